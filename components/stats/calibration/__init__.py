"""How far the confidence of a model that names the better of two may be believed."""
