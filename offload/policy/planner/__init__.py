"""Predictions of a run: pages, seconds, what binds, and what would help. Pure."""
