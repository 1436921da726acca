"""What the models of a device share: its manager, streams, graphs and its part in a shared budget.

The face: `of`, `known`, `add_giver` and `give_up` (managers.py), `marks_of`, `stream_of` and `relaxed` (streams.py),
`join` and `reach` (shared.py), `key_of` (key.py). Below pieces and streaming `graphs` and `references`, too.
"""
