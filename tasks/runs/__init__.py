"""A run's folder on disk; nothing else reads or writes it."""
