"""Read rows of the user's files, store them on disk and measure them one by one."""
