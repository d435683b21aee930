"""Evaluation of reward models on suites of pairs that others have judged."""
