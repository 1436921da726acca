"""Decoding in pieces of CUDA graphs: everything of a forward but its cache and its attention is launched at once."""
