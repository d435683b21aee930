"""Language models: load, save, tokenize, score, sample."""
