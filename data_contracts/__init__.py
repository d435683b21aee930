"""The data contract: row schemas, Great Expectations suites, and the validate stage that runs before any training."""
