"""Data: the built-in task, readers for real data, and splits by prompt."""
