"""Reading stored tokens while requests go on: for the saving thread, and for blocks of continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from .contents import Contents, Lookup
from .identity import Identity
from .prompt_filler import up_to
from .sequence import Gone, Pair, TokenRun, reading


class StoredTokens:
    """Keys and values of the stored tokens of some runs."""

    def __init__(self, runs: Sequence[TokenRun]) -> None:
        """`runs`: at least one; their sources stay in place."""
        self._runs = runs
        self.layers = runs[0].source.held  # the layers that hold tokens

    def __call__(self, layer: int) -> Pair:
        """Returns keys and values of a layer, [1, heads, tokens, dim] on the device. Gone."""
        keys, values = zip(*(run.source.part(layer, run.start, run.end) for run in self._runs), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


@contextmanager
def read(contents: Contents, ids: Sequence[int], now: Identity, start: int, end: int) -> Iterator[StoredTokens | None]:
    """Keeps the tokens [start, end) of a stored prompt in place; None where they cannot be read now. On any thread;
    only threads that need the pages of these tokens wait for it."""
    lookup = Lookup()
    with contents.change() as index:
        known = contents.weights == now.weights
        runs = index.blocks.find(ids[:end], now.settings, peek=True) if known else []
        sources = contents.begin_reading(lookup, runs)
    try:
        found = runs[-1].end if runs else 0
        runs = cut(runs, start, end)
        if not runs or found < end:
            yield None
            return
        with open_runs(runs) as tokens:
            yield tokens
    finally:
        contents.end_reading(lookup, sources)


@contextmanager
def open_runs(runs: Sequence[TokenRun]) -> Iterator[StoredTokens | None]:
    """Keeps the tokens of the runs in place; None where they cannot be read now."""
    with ExitStack() as held:
        tokens: StoredTokens | None = StoredTokens(runs)
        try:
            held.enter_context(reading(runs))
        except Gone:
            tokens = None
        yield tokens


def cut(runs: Sequence[TokenRun], start: int, end: int) -> list[TokenRun]:
    """Returns the runs of the tokens [start, end)."""
    return [run._replace(start=max(start, run.start)) for run in up_to(runs, end) if run.end > start]
