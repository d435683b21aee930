"""The lineage of a run as a picture: boxes and arrows, drawn as SVG."""
