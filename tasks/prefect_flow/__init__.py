"""Stages as Prefect tasks, and the Prefect server."""
