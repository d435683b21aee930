"""Start a run, compute it, and continue it with people's labels."""
