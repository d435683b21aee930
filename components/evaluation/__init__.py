"""Evaluation of a policy beside SFT: tasks of the field's harness and probes of alignment."""
