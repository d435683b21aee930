"""Analyses of the data: annotator agreement, drift, near-duplicates, and faults of texts and of the whole data set."""
