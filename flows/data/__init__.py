"""Prepare data and base models before a run: check a file, sample candidates, label pairs, fetch a model."""
