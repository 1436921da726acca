"""Reading tokens that are stored, while requests go on: for whoever writes them to files, or has them elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from .contents import Contents, Lookup
from .identity import Identity
from .prompt_filler import up_to
from .sequence import Gone, Pair, TokenRun, reading


class StoredTokens:
    """Keys and values of some stored tokens, as the runs say where they lie."""

    def __init__(self, runs: Sequence[TokenRun]) -> None:
        """`runs`: at least one, whose sources are kept where they are."""
        self._runs = runs
        self.layers = runs[0].source.held  # that hold tokens

    def __call__(self, layer: int) -> Pair:
        """Returns keys and values of a layer, [1, heads, tokens, dim] on the device. Gone."""
        keys, values = zip(*(run.source.part(layer, run.start, run.end) for run in self._runs), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


@contextmanager
def read(contents: Contents, ids: Sequence[int], now: Identity, start: int, end: int) -> Iterator[StoredTokens | None]:
    """Keeps the tokens [start, end) of a stored prompt where they are; None where they cannot be read now. For any
    thread; only those who need the pages of these tokens wait for it."""
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
    """Keeps the tokens of the runs where they are; None where they cannot be read now."""
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
