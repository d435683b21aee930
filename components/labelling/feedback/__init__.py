"""A model's votes on pairs: the rubric, the answers in both orders, and how far they can be believed."""
