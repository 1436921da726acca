"""Requests to a model whose prefixes are kept, and to stock with the same cache held by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache

import ballonet
from ballonet.hooks.prefix import sessions
from ballonet.hooks.prefix.store import PrefixStore

from ..models import VOCABULARY, build

BLOCK: Final = 8  # tokens
HELD: Final = ("device", "host", "alias")
Pair = tuple[torch.Tensor, torch.Tensor]


def outside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory of the pool."""
    return torch.from_numpy(np.array(tensor.numpy(force=True)))


@dataclass
class Sides:
    """A managed model with a store, and its stock twin. Every request is made of both and compared."""

    model: Any
    stock: Any
    managed: ballonet.Managed
    store: PrefixStore
    # by thread: what its last request began with, by layer, and how many had ended before
    begun: dict[int, tuple[list[Pair], int]] = field(default_factory=dict)
    known: list[tuple[list[int], list[Pair]]] = field(default_factory=list)  # what each left: tokens, by layer

    def ask(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """The tokens, after a look at where the cache came from, and at what stock makes of it."""
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, **options}
        self.begun.pop(get_ident(), None)
        torch.manual_seed(5)
        tokens = self.model.generate(ids, **settings)
        tokens = tokens if isinstance(tokens, torch.Tensor) else tokens.sequences
        began, before = self.begun.get(get_ident(), (None, 0))
        cache = DynamicCache(config=self.stock.config)
        if began is not None:
            self.is_known(ids, began, settings.get("attention_mask"), before)
            for layer, pair in zip(cache.layers, began, strict=True):
                layer.update(*pair)
        torch.manual_seed(5)
        want = self.stock.generate(ids, **settings, past_key_values=cache)
        want = want if isinstance(want, torch.Tensor) else want.sequences
        assert torch.equal(tokens, want), "other tokens than with the same cache held by hand"
        return tokens

    def is_known(self, ids: torch.Tensor, began: Sequence[Pair], mask: torch.Tensor | None, before: int) -> None:
        """What a request begins with was left by so many earlier ones for these very tokens, bit for bit."""
        expand = len(began[0][0]) // len(ids)
        for row, tokens in enumerate(ids.repeat_interleave(expand, 0).tolist()):
            pad = 0 if mask is None else int((mask[row] == 0).sum())
            columns = began[0][0].shape[2]
            assert columns < len(tokens)
            for start in range(0, columns - pad, BLOCK):
                end = min(start + BLOCK, columns - pad)
                here = [tuple(each[row, :, pad + start : pad + end] for each in pair) for pair in began]
                prompt = tokens[pad : pad + end]
                assert any(
                    left[:end] == prompt
                    and all(
                        torch.equal(each[:, start:end], new)
                        for old, pair in zip(there, here, strict=True)
                        for each, new in zip(old, pair, strict=True)
                    )
                    for left, there in self.known[:before]
                ), f"tokens {start}..{end} of row {row} were never computed like that"

    def check(self) -> None:
        """Whatever the index says is there, once, and is what was computed for these tokens."""
        store, index = self.store, self.store.contents.index.blocks.index
        for sequence, pages in store.contents.index.idle.items():
            assert not sequence.in_use
            assert sequence.keys
            assert pages == sequence.pages
            assert {layer.get_seq_length() for layer in sequence.used} == {len(sequence.ids)}
            assert index.owner(sequence.keys[-1]) is sequence
            assert sequence.missing <= sequence.first
            for home in sequence.kv_ranges:
                there = [home.range.backing(piece) for piece in range(home._most)]
                assert home.held == sum(each in HELD for each in there), (home._first, there)
        for key in index:
            owner = index.owner(key)
            start = owner.keys.index(key) * store.block
            end = min(start + store.block, len(owner.ids))
            assert owner.in_use or owner in store.contents.index.idle
            here = [[each[0] for each in layer.part(start, end)] for layer in owner.used]
            assert any(
                left[:end] == list(owner.ids[:end])
                and all(
                    torch.equal(each[:, start:end], new)
                    for old, pair in zip(there, here, strict=True)
                    for each, new in zip(old, pair, strict=True)
                )
                for left, there in self.known
            ), "what is stored is not what was computed"

    @property
    def reused(self) -> int:
        """Columns that the last request began with."""
        began, _ = self.begun.get(get_ident(), (None, 0))
        return 0 if not began else began[0][0].shape[2]


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
            both.begun[get_ident()] = began, len(both.known)

    def end(request: Any, result: Any) -> None:
        tokens = result if isinstance(result, torch.Tensor) else result.sequences
        length = request._layers[0].get_seq_length() if request._layers else 0
        beams = request._beams
        for row, ids in enumerate((tokens if beams == 1 else request._ids).tolist()):
            if length:
                pad, row = request._pads[row * beams], row * beams
                left = [
                    (outside(each.keys[row, :, pad:]), outside(each.values[row, :, pad:])) for each in request._layers
                ]
                both.known.append((ids[pad:length], left))
        ended(request, result)

    with monkeypatch.context() as patched:
        patched.setattr(sessions._Request, "prepared", begin)
        patched.setattr(sessions._Request, "ended", end)
        yield both
    managed.release()


def words(generator: torch.Generator, count: int, rows: int = 1) -> torch.Tensor:
    """Random tokens, int64[rows, count]."""
    return torch.randint(2, VOCABULARY, (rows, count), generator=generator)
