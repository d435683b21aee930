"""The review page: people judge pairs in a browser, and their answers come back as raters' files."""
