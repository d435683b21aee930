"""People's labels: the sheets that they fill in, other tools, and how far the labels are."""
