"""The formats of preference and demonstration files."""
