"""One style, and the figures that every notebook uses."""
