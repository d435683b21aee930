"""Run stages as Prefect tasks, and manage the Prefect server."""
