"""Compose the parts: config, profiles, the pipeline in `rlhf.py`, and the command line."""
