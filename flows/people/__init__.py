"""People's labels: rating sheets, exchange with other tools, and progress."""
