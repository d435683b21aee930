"""What the store must keep for runs and models, and runs as files."""
