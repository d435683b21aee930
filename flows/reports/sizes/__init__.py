"""Plan a run's size: the memory of each phase, and how cost grows with size."""
