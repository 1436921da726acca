"""A model's weights in the pool: found, laid out, moved in, followed through changes, and their files.

The face: `Weights`, `is_away` and `working_pages` (ranges.py), `decoder_layers`, `members`, `spans` and `has_bytes`
(model_parts.py), `WeightsFollower` (follow.py), `file_spans` (files.py). Streaming moves layers by moving.py.
"""
