"""The training loop, its optimiser, checkpoints and signals."""
