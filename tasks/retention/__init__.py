"""Decide what the store must keep for runs and models, and export and import runs as files."""
