"""Keep a home and its servers safe: backup, restore, and upgrade from older formats (`tether upgrade`)."""
