"""Requests to a model whose prefixes are kept, and to stock with the same cache held by hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache

import ballonet
from ballonet.allocator import install
from ballonet.hooks.prefix import sessions
from ballonet.hooks.prefix.store import PrefixStore

from ..models import VOCABULARY, build

BLOCK: Final = 8  # tokens
HELD: Final = ("device", "host", "alias")
Pair = tuple[torch.Tensor, torch.Tensor]


def outside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory of the pool."""
    return torch.from_numpy(np.array(tensor.numpy(force=True)))


def chained(ids: Sequence[int], salt: int = 0) -> list[int]:
    """One number per token, of it and all before it."""
    found = []
    for each in ids:
        salt = hash((salt, each))
        found.append(salt)
    return found


def digests(layers: Sequence[Pair], row: int, start: int, end: int) -> list[int]:
    """One number per column [start, end), of its keys and values in all layers."""
    parts = [each[row, :, start:end].transpose(0, 1).flatten(1) for pair in layers for each in pair]
    return [hash(each.tobytes()) for each in torch.cat(parts, 1).numpy()]


def check_index(store: PrefixStore) -> None:
    """Whatever the index says is stored is there once, no request holds it, and each key leads to whom has it."""
    index = store.contents.index
    for sequence in tuple(index.idle):
        saver = store.contents.saver
        while sequence.readers and saver is not None and saver._busy:  # which reads in the background
            time.sleep(1e-3)
        assert not sequence.readers
        assert not sequence.in_use
        assert sequence.keys
        assert index.idle[sequence] == sequence.pages
        assert {layer.get_seq_length() for layer in sequence.used} == {len(sequence.ids)}
        assert index.blocks.owns(sequence, sequence.keys[-1])
        assert sequence.missing <= sequence.first
        for held in sequence.kv_ranges:
            assert held.held == sum(held.range.backing(piece) in HELD for piece in range(held._most + 2))
    has = {(key, sequence) for sequence in index.idle for key in sequence.keys}
    has |= {(state.key, state) for state in index.states}
    for key in index.blocks.index:
        assert (key, index.blocks.index.owner(key)) in has, "a key that leads to other tokens"


def check_tokens(store: PrefixStore, known: dict[int, set[int]], salt: int = 0) -> None:
    """What is stored for the model as it is now is what was computed for these tokens, bit for bit."""
    now = store.identity()
    if now.weights != store.contents.weights:
        return
    with install.stock():
        for sequence in tuple(store.contents.index.idle):
            start, end = sequence.missing, len(sequence.ids)
            if sequence.salt == now.settings and start < end:
                pairs = [tuple(map(outside, layer.part(start, end))) for layer in sequence.used]
                keys = chained(sequence.ids, salt)[start:]
                for key, found in zip(keys, digests(pairs, 0, 0, end - start), strict=True):
                    assert found in known.get(key, ()), "what is stored is not what was computed"


def evict_all(store: PrefixStore) -> None:
    """Evicts what may be."""
    limit, store.limit = store.limit, 0
    store.limit = limit


@dataclass
class Sides:
    """A managed model with a store, and its stock twin. Every request is made of both and compared."""

    model: Any
    stock: Any
    managed: ballonet.Managed
    store: PrefixStore
    begun: dict[int, list[Pair]] = field(default_factory=dict)  # by thread: what its last request began with, by layer
    known: dict[int, set[int]] = field(default_factory=dict)  # by chained tokens, what was computed for the last one

    def ask(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """The tokens, after a look at where the cache came from, and at what stock makes of it."""
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, **options}
        self.begun.pop(get_ident(), None)
        torch.manual_seed(5)
        tokens = self.model.generate(ids, **settings)
        tokens = tokens if isinstance(tokens, torch.Tensor) else tokens.sequences
        cache = DynamicCache(config=self.stock.config)
        if (began := self.begun.get(get_ident())) is not None:
            for layer, pair in zip(cache.layers, began, strict=True):
                layer.update(*pair)
        torch.manual_seed(5)
        want = self.stock.generate(ids, **settings, past_key_values=cache)
        want = want if isinstance(want, torch.Tensor) else want.sequences
        assert torch.equal(tokens, want), "other tokens than with the same cache held by hand"
        return tokens

    def is_known(self, request: Any, began: Sequence[Pair]) -> None:
        """What a request begins with was left by earlier ones for these very tokens, bit for bit."""
        columns, expand = began[0][0].shape[2], len(began[0][0]) // len(request._ids)
        for row, tokens in enumerate(request._ids.repeat_interleave(expand, 0).tolist()):
            pad = request._pads[row]
            assert columns < len(tokens)
            keys = chained(tokens[pad:columns])
            for at, (key, found) in enumerate(zip(keys, digests(began, row, pad, columns), strict=True)):
                assert found in self.known.get(key, ()), f"token {at} of row {row} was never computed like that"

    def check(self) -> None:
        """Whatever the index says is there, once, and is what was computed for these tokens."""
        check_index(self.store)
        check_tokens(self.store, self.known)

    @property
    def reused(self) -> int:
        """Columns that the last request began with."""
        began = self.begun.get(get_ident())
        return began[0][0].shape[2] if began else 0


@contextmanager
def sides(
    monkeypatch: Any, name: str = "llama", *, block: int = BLOCK, chaos: int | None = None, **options: Any
) -> Iterator[Sides]:
    """Of the tiny model of that name. `options`: of `manage()`. Released in the end, when nothing may be left."""
    model = build(name)
    stock = copy.deepcopy(model)
    managed = ballonet.manage(model, chaos=chaos, prefix_cache=options.pop("prefix_cache", True), **options)
    store = managed.prefixes
    assert store is not None
    store.contents.index.blocks.block = block
    both = Sides(model, stock, managed, store)
    prepared, ended = sessions._Request.prepared, sessions._Request.ended

    def begin(request: Any, given: dict[str, Any]) -> None:
        prepared(request, given)
        cache = given["model_kwargs"].get("past_key_values")
        if request._lookup.columns:
            began = [(outside(each.keys), outside(each.values)) for each in cache.layers]
            both.is_known(request, began)
            both.begun[get_ident()] = began

    def end(request: Any, result: Any) -> None:
        tokens = result if isinstance(result, torch.Tensor) else result.sequences
        length = request._layers[0].get_seq_length() if request._layers else 0
        beams = request._beams
        for row, ids in enumerate((tokens if beams == 1 else request._ids).tolist()):
            if length:
                pad, row = request._pads[row * beams], row * beams
                left = [(outside(each.keys), outside(each.values)) for each in request._layers]
                for key, found in zip(chained(ids[pad:length]), digests(left, row, pad, length), strict=True):
                    both.known.setdefault(key, set()).add(found)
        ended(request, result)

    with monkeypatch.context() as patched:
        patched.setattr(sessions._Request, "prepared", begin)
        patched.setattr(sessions._Request, "ended", end)
        yield both
    managed.release()


def words(generator: torch.Generator, count: int, rows: int = 1) -> torch.Tensor:
    """Random tokens, int64[rows, count]."""
    return torch.randint(2, VOCABULARY, (rows, count), generator=generator)
