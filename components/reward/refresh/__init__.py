"""Continue an earlier reward model on new pairs, and compare the two."""
