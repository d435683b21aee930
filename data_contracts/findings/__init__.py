"""What is found in data: disagreement, drift, near-duplicates, faults of texts and of whole files."""
