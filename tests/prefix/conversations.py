"""Requests to a model whose prefixes are kept, and to stock with the same cache held by hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ballonet import testing
from ballonet.allocator import install
from ballonet.hooks.compat import cache_name, computes_whole_prompt
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.prefix import sessions
from ballonet.hooks.prefix.index import PrefixIndex
from ballonet.hooks.prefix.store import PrefixStore

from ..models import VOCABULARY, build

BLOCK: Final = 8  # tokens
HELD: Final = ("device", "host", "alias")
_TOKENS: Final = ("keys", "values", "is_initialized", "device", "dtype")  # of an elastic layer: not of its state
Pair = tuple[torch.Tensor, torch.Tensor]


def words(generator: torch.Generator, count: int, rows: int = 1) -> torch.Tensor:
    """Random tokens, int64[rows, count]."""
    return torch.randint(2, VOCABULARY, (rows, count), generator=generator)


def outside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory of the pool."""
    return torch.from_numpy(np.array(tensor.numpy(force=True)))


def chained(ids: Sequence[int], salt: int = 0) -> list[int]:
    """One number per token, of it and all before it."""
    keys = []
    for token in ids:
        salt = hash((salt, token))
        keys.append(salt)
    return keys


def digests(layers: Sequence[Pair], row: int, start: int, end: int) -> list[int]:
    """One number per column [start, end), of its keys and values in all layers."""
    parts = [states[row, :, start:end].transpose(0, 1).flatten(1) for pair in layers for states in pair]
    return [hash(state.tobytes()) for state in torch.cat(parts, 1).numpy()] if parts else []


def own(value: Any) -> Any:
    """A copy that takes no memory of the pool."""
    if isinstance(value, torch.Tensor):
        return outside(value)
    return {key: own(part) for key, part in value.items()} if isinstance(value, dict) else value


def by_hand(layers: Sequence[Any], empty: DynamicCache) -> DynamicCache:
    """A stock cache that holds the same."""
    cache = copy.deepcopy(empty)
    for stock, layer in zip(cache.layers, layers, strict=True):
        elastic = isinstance(layer, ElasticLayer)
        names = (
            [name for name in vars(stock) if name in vars(layer) and name not in _TOKENS] if elastic else vars(layer)
        )
        vars(stock).update({name: own(vars(layer)[name]) for name in names})
        if elastic and layer.is_initialized:
            stock.update(outside(layer.keys), outside(layer.values))
    return cache


def growing(layers: Sequence[Any]) -> list[Pair]:
    """Keys and values of the layers that keep every token."""
    return [(layer.keys, layer.values) for layer in layers if _grows(layer)]


def state(layers: Sequence[Any]) -> int:
    """One number of all that the layers hold beside these keys and values; 0 where there is nothing else."""

    def tensors(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from tensors(item)

    hashes = [
        tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(str(tensor), "ascii")
        for layer in layers
        for name, value in sorted(vars(layer).items())
        if not (_grows(layer) and name in ("keys", "values"))
        for tensor in tensors(value)
    ]
    return hash(tuple(hashes)) if hashes else 0


def _grows(layer: Any) -> bool:
    return isinstance(layer, (DynamicLayer, ElasticLayer)) and not layer.is_sliding and bool(layer.is_initialized)


def check_index(store: PrefixStore) -> None:
    """What the index says is stored is there once, has what it needs, no request holds it, and keys lead to it."""
    contents = store.contents
    while True:
        with contents.lock:  # others may evict meanwhile
            reading = contents.saver is not None and contents.saver._busy  # in the background
            if not (reading and any(sequence.readers for sequence in contents.index.idle)):
                _check(contents.index)
                return
        time.sleep(1e-3)


def _check(index: PrefixIndex) -> None:
    for sequence in tuple(index.idle):
        assert not sequence.readers
        assert not sequence.in_use
        assert sequence.keys
        assert index.idle[sequence] == sequence.pages
        assert {layer.get_seq_length() for layer in sequence.used} == {len(sequence.ids)}
        assert index.blocks.owns(sequence, sequence.keys[-1])
        assert sequence.missing <= sequence.first
        for held in sequence.kv_ranges:
            assert held.shown.lost >= held.geometry.full(sequence.first), "pages of another's tokens"
            assert held.held == sum(held.range.leads_to(piece) in HELD for piece in range(held._most + 2))
        start = (len(sequence.keys) - 1) * BLOCK
        assert (
            not sequence.needs_state
            or index.blocks.index.after(sequence.keys[-1])
            or any(
                min(len(state.ids), len(sequence.ids)) > start and not _differ(state.ids, sequence.ids)
                for state in index.states
            )
        ), "tokens that no state needs"
    for state in index.states:
        assert index.find_state(state.ids, state.salt, state.growing, peek=True)[1] is state
    has = {(key, sequence) for sequence in index.idle for key in sequence.keys}
    has |= {(state.key, state) for state in index.states}
    for key in index.blocks.index:
        assert (key, index.blocks.index.owner(key)) in has, "a key that leads to other tokens"


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """Somewhere, as far as both go?"""
    return any(mine != theirs for mine, theirs in zip(one, other, strict=False))


def evict_all(store: PrefixStore) -> None:
    """Evicts what may be."""
    limit, store.limit = store.limit, 0
    store.limit = limit


@dataclass
class Asked:
    """The last request of a thread: what it began with, and the tokens' keys and values that it left."""

    columns: int = 0
    began: DynamicCache | None = None
    left: list[Pair] = field(default_factory=list)
    pads: Sequence[int] = ()
    end: int = 0  # columns that are filled then


class Sides:
    """A managed model with a store, and its stock twin. Every request is made of both and compared.

    What a request begins with was computed for these very tokens, bit for bit: of layers that keep every token, each;
    of others, their state behind exactly these tokens. What it leaves, and its tokens, are those of stock that goes on
    from the same cache."""

    salt = 0  # of what the model computes now

    def __init__(
        self, name: str, prepare: Callable[[Any], None] | None = None, changes: Mapping[str, Any] | None = None
    ) -> None:
        with install.stock():
            self.model = build(name, **(changes or {}))
            if prepare is not None:
                prepare(self.model)
            self.stock = copy.deepcopy(self.model)
            self.empty = DynamicCache(config=self.stock.config.get_text_config(decoder=True))
        self.asked: dict[int, Asked] = {}  # by thread
        self.known: dict[int, set[int]] = {}  # by chained tokens, what was computed for the last one

    def manage(self, block: int = BLOCK, **options: Any) -> None:
        self.managed = testing.manage(self.model, **{"prefix_cache": True, **options})
        assert self.managed.prefixes is not None
        self.store = self.managed.prefixes
        self.store.contents.index.blocks.block = block
        if self.store.contents.saver is not None:
            self.store.contents.saver._block = block
        self.hooks = len(self.model._forward_pre_hooks)  # when nothing runs

    def ask(self, ids: torch.Tensor, act: Callable[[], torch.Tensor] | None = None, **options: Any) -> torch.Tensor:
        """The tokens. `act`: in the place of `generate`. Raises what stock raises as well."""
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, **options}
        self.asked[get_ident()] = Asked()
        torch.manual_seed(5)
        error: Exception | None = None
        try:
            result = outside(_tokens(self.model.generate(ids, **settings) if act is None else act()))
        except (IndexError, ValueError) as caught:
            error = caught
        asked = self.asked[get_ident()]
        with install.stock(), torch.no_grad():
            if asked.began is not None:
                self._is_known(asked, ids)
            if error is not None:
                with pytest.raises(type(error)):
                    self._of_stock(asked, ids, settings)
                raise error
            want, cache = self._of_stock(asked, ids, settings)
            assert torch.equal(result, want), "other tokens than with the same cache held by hand"
            for ours, theirs in zip(asked.left, growing(cache.layers) if asked.left else (), strict=True):
                for mine, right in zip(ours, theirs, strict=True):
                    for row, pad in enumerate(asked.pads):
                        same = torch.equal(mine[row, :, pad : asked.end], right[row, :, pad : asked.end])
                        assert same, "other keys and values than with the same cache held by hand"
        return result

    def _of_stock(self, asked: Asked, ids: torch.Tensor, settings: dict[str, Any]) -> tuple[torch.Tensor, DynamicCache]:
        """The tokens, and the cache. States are noted behind the prompt and behind the answer."""
        mask = settings.get("attention_mask")
        skipped = asked.columns if computes_whole_prompt(self.empty) else 0  # such a model is given only what is new
        states = any(type(layer) is not DynamicLayer for layer in self.empty.layers)
        for new in (1, settings["max_new_tokens"]) if states else (settings["max_new_tokens"],):
            cache = copy.deepcopy(self.empty if asked.began is None else asked.began)
            given = settings | {"max_new_tokens": new, "min_new_tokens": min(new, settings["min_new_tokens"])}
            given |= {cache_name(self.stock): cache}
            if mask is not None:
                given["attention_mask"] = mask[:, skipped:]
            torch.manual_seed(5)
            output = _tokens(self.stock.generate(ids[:, skipped:], **given))
            want = torch.cat([ids[:, :skipped], output], 1) if skipped else output
            if states:
                read = chained(want[0, :-1].tolist(), self.salt)[-1]
                self.known.setdefault(hash((read, "state")), set()).add(state(cache.layers))
        return want, cache

    def _is_known(self, asked: Asked, ids: torch.Tensor) -> None:
        assert asked.began is not None
        assert asked.columns < ids.shape[1]
        pairs, behind = growing(asked.began.layers), state(asked.began.layers)
        expand = len(asked.pads) // len(ids)
        for row, tokens in enumerate(ids.repeat_interleave(expand, 0).tolist()):
            pad = asked.pads[row]
            keys = chained(tokens[pad : asked.columns], self.salt)
            for at, (key, digest) in enumerate(zip(keys, digests(pairs, row, pad, asked.columns), strict=bool(pairs))):
                assert digest in self.known.get(key, ()), f"token {at} of row {row} was never computed like that"
            if behind and keys:
                assert behind in self.known.get(hash((keys[-1], "state")), ()), "stock never had that state"

    def begin(self, request: Any) -> None:
        """A request has been prepared."""
        columns = request._lookup.columns
        with install.stock():
            began = by_hand(request._layers, self.empty) if columns else None
        self.asked[get_ident()] = Asked(columns, began, pads=tuple(request._pads))

    def end(self, request: Any, tokens: torch.Tensor) -> None:
        """A request ends, with what may be kept from now on."""
        layers = [layer for layer in request._layers if isinstance(layer, ElasticLayer) and layer.is_initialized]
        if not layers:
            return
        asked, beams = self.asked[get_ident()], request._beams
        asked.left = [(outside(layer.keys), outside(layer.values)) for layer in layers]
        asked.end = layers[0].get_seq_length()
        for number, ids in enumerate((tokens if beams == 1 else request._ids).tolist()):
            row = number * beams
            pad, end = request._pads[row], min(asked.end, len(ids))
            hashes = digests(asked.left, row, pad, end)
            for key, digest in zip(chained(ids[pad:end], self.salt), hashes, strict=True):
                self.known.setdefault(key, set()).add(digest)

    def check(self, *, tokens: bool = True) -> None:
        """Whatever the index says is there, once, and is what was computed for these tokens."""
        assert len(self.model._forward_pre_hooks) in (0, self.hooks)
        check_index(self.store)
        now = self.store.identity()
        if not tokens or now.weights != self.store.contents.weights:
            return
        with install.stock():
            for sequence in tuple(self.store.contents.index.idle):
                start, end = sequence.missing, len(sequence.ids)
                if sequence.salt == now.settings and start < end:
                    parts = (layer.part(start, end) for layer in sequence.used)
                    pairs = [(outside(keys), outside(values)) for keys, values in parts]
                    for key, digest in zip(
                        chained(sequence.ids, self.salt)[start:], digests(pairs, 0, 0, end - start), strict=True
                    ):
                        assert digest in self.known.get(key, ()), "what is stored is not what was computed"

    @property
    def reused(self) -> int:
        """Columns that the last request of this thread began with."""
        return self.asked[get_ident()].columns


def _tokens(result: Any) -> torch.Tensor:
    tokens: torch.Tensor = result if isinstance(result, torch.Tensor) else result.sequences
    return tokens


@contextmanager
def watched(both: Sequence[Sides]) -> Iterator[None]:
    """What requests begin with and leave behind is noted."""
    prepared, ended = sessions._Request.prepared, sessions._Request.ended

    def of(request: Any) -> Sides:
        return next(side for side in both if side.model is request.model)

    def begin(request: Any, given: dict[str, Any]) -> None:
        prepared(request, given)
        of(request).begin(request)

    def end(request: Any, result: Any) -> None:
        of(request).end(request, _tokens(result))
        ended(request, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions._Request, "prepared", begin)
        patch.setattr(sessions._Request, "ended", end)
        yield


@contextmanager
def sides(
    name: str = "llama",
    *,
    prepare: Callable[[Any], None] | None = None,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Sides]:
    """Both sides of the tiny model of that name. `prepare`: the model; `changes`: of its configuration; `options`: of
    `manage()`. Released in the end, when nothing may be left."""
    both = Sides(name, prepare, changes)
    both.manage(**options)
    with watched([both]):
        yield both
    both.managed.release()
