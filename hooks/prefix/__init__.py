"""Prefixes that are kept: what generate() leaves behind is found again by the prompts that begin with it.

The face: `PrefixStore` and `numbers` (store.py), `attach` and `without_stores` (sessions.py), `Saver` (saving.py),
`samples` (identity.py). Only batching, whose blocks are in the same index, builds on what is inside: `Contents`,
`PagedBlocks`, `TokenSource` and `Identity`.
"""
