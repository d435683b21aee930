"""One stage in several processes, its ranks: starting them, sharing out rows, sharding models, ending together."""
