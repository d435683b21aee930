"""What a run takes on a machine, on paper: memory by phase, and operations. Importable without torch."""
