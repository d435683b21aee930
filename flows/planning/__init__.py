"""Compute on paper how much memory a run takes, phase by phase. Importable without torch."""
