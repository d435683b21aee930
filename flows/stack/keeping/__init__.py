"""What is kept of a home and its servers: backup, restore, and the way from older forms (`tether upgrade`)."""
