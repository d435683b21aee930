"""A stage's key: what goes into it and how two keys differ."""
