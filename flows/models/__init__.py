"""Work on a finished model: card, lineage, evaluation, export, promotion and reproduction."""
