"""Arrow tables: cells of users' files, and the splits that validation publishes."""
