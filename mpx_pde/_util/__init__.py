"""Helpers that know nothing of precision: types, texts, notes on errors, wrappers."""
