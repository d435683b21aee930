"""Starting a run, computing it, and taking it up again with people's labels."""
