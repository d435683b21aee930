"""Run the pipeline on a Prefect server: deployments, their flows, and the servers on this machine."""
