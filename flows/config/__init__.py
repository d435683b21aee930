"""A run's options and thresholds: profiles, config files, overrides, and what is wrong with them."""
