"""Grading what others have written: in a sandbox, on inputs that they haven't seen, the same points for the same seed."""
