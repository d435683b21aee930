"""Data and base models, before a run: check a file, sample candidates, fetch a pretrained model."""
