"""Computing: torch, transformers and pandas; no orchestrator, tracker or data-contract library."""
