"""An example of Tether's three kinds of plug-ins."""
