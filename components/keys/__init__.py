"""A stage's key: what goes into it, users' code included, how two keys differ, and the process that runs such code."""
