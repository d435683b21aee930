"""What a run needs: memory of each phase, and how cost grows with size."""
