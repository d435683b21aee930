"""A finished model, for people: its card, lineage, export, promotion and reproduction."""
