"""Formats, the present half precision, casts, and trees of arrays."""
