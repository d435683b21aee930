"""Intervals, agreement and votes."""
