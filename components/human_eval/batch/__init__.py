"""What goes out to raters and what comes back: attention items, returned sheets, Label Studio."""
