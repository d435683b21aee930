"""Everything that all stages have in common (key, cache, record, gates), and the only package that imports MLflow."""
