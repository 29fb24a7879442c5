"""A kernel in use: loaded, called, checked against float64 and X-rayed."""
