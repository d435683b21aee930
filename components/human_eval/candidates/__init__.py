"""Responses of several models as blinded pairs to label."""
