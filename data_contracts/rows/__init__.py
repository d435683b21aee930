"""Rows of the user's files, gathered, kept on disk and checked one by one."""
