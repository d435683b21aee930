"""Migrations: one file per change of the tables."""
