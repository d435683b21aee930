"""The life of a stage: key, look up, compute, publish, record, gate."""
