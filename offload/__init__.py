"""Decisions about memory and its movement. Knows nothing of torch modules or transformers."""
