"""The checks as Great Expectations suites, and their pages. No other package imports Great Expectations."""
