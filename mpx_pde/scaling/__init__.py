"""Scales of losses and of derivatives, their rules, and what they count."""
