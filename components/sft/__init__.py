"""Supervised fine-tuning on the responses of demonstrations."""
