"""One style, and the figures that notebooks share."""
