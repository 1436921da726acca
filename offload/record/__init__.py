"""Measurements of this machine: the link and the performance record."""
