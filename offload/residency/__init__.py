"""Movement: the copies that fill slots and restore pages, backings and the files behind them.

The face: `Mover` (mover.py), `Backing` and `FileBacking` (backing.py), `Pieces` and their states (pieces.py), `Ring`
and `StreamedLayer` (ring.py), `KVExtent` (kv_extent.py), `WeightsFile` (weights_file.py), `PrefixFiles`
(prefix_files.py).
"""
