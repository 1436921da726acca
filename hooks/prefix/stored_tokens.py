"""Reading tokens that are stored, while requests go on: for whoever writes them to files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch

from .contents import Contents, Lookup
from .identity import Identity
from .prompt_filler import up_to
from .sequence import CachedSequence, Gone, Pair, Run, reading


class StoredTokens:
    """Keys and values of some stored tokens, as the runs say where they lie."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        first = cast(CachedSequence, runs[0].source)
        self.layers = [number for number in range(len(first.layers)) if first.holds(number)]  # that hold tokens

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
        runs = index.blocks.find(ids[:end], now.settings, peek=True)
        found = runs[-1].end if runs else 0
        runs = [run._replace(start=max(start, run.start)) for run in up_to(runs, end) if run.end > start]
        sources = contents.begin_reading(lookup, runs)
    try:
        if not runs or found < end or contents.weights != now.weights:
            yield None
            return
        with ExitStack() as held:
            tokens: StoredTokens | None = StoredTokens(runs)
            try:
                held.enter_context(reading(runs))
            except Gone:
                tokens = None
            yield tokens
    finally:
        contents.end_reading(lookup, sources)
