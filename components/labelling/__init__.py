"""Data to label: responses of several models as blinded pairs, and a model's votes on pairs."""
