"""Reports on runs: the HTML page, the terminal's tables, and comparisons of runs."""
