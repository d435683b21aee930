"""MLflow: what runs wrote down is carried there; nothing else imports it."""
