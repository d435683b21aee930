"""Servers and workers of one machine: PostgreSQL, Prefect, MLflow, S3, TLS, supervised (`tether stack`)."""
