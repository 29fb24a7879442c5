"""The matter of one notebook: its drawings, models and exhibits."""
