"""A kernel file: what its header block says, what a call of it takes, and how its source is shown."""
