"""What data must hold before anything learns from it: row schemas, Great Expectations suites, the validate stage."""
