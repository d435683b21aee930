"""Wrapping: what every stage's life has in common (key, cache, record, gate), and the only importer of MLflow."""
