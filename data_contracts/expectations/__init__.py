"""Findings as Great Expectations suites and their pages; nothing else imports Great Expectations."""
