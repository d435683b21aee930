"""A run's folder on disk. No other package reads or writes it."""
