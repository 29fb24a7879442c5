"""What single notebooks need: their drawings, models and exhibits."""
