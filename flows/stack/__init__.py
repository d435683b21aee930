"""`tether stack`: supervised servers and workers on one machine: PostgreSQL, Prefect, MLflow, S3 and TLS."""
