"""Prefixes that are kept: what generate() leaves behind is found again by the prompts that begin with it.

The face: `PrefixStore` and `numbers` (store.py); `attach` and `without_stores` (sessions.py); `Saver` (saving.py); for
batches `Contents` (contents.py), `Identity` and `samples` (identity.py), `TokenRun` and `open_runs` (sequence.py).
"""
