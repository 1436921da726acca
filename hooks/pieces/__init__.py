"""Decoding in pieces of CUDA graphs: everything of a forward but its cache and its attention is launched at once.

The face: `PieceRunner` (runner.py), `attach` and `keep_off` (calls.py), `foreseen` (outlook.py).
"""
