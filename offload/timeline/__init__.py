"""Timelines: a run is recorded, thinned, and written to a file.

The face: `timeline` and `mark` (recorder.py), what a file may be called (`check`, file.py), and `FleetRecording` of
several processes (fleet.py).
"""
