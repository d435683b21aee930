"""A run, for people: its page, its lines on the terminal, its difference from another run."""
