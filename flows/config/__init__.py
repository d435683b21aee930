"""Read and check a run's config: profiles, config files and overrides."""
