"""Layers that stream: which do, what their forwards read, and what graphs have captured of them."""
