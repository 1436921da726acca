"""Timelines: a run is recorded, thinned, and written to a file."""
