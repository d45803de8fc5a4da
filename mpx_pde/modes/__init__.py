"""Modes: in which precision a loss is evaluated and differentiated, and by what."""
