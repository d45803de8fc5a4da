"""Products of halves that sum in float32, and the order of a backward pass."""
