"""The review page: people judge pairs in a browser, and their answers become raters' files."""
