"""Gates: their table, judging by them, and their words."""
