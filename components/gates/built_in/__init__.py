"""Built-in gates by stage, a record a gate."""
