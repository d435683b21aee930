"""The pipeline on a Prefect server: deployments, the flows they run, the servers on this machine."""
