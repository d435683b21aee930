"""Draw a run's lineage as an SVG picture of boxes and arrows."""
