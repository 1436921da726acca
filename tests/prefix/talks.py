"""Requests to a model whose layers keep windows or states, and to stock with the same cache held by hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.prefix import sessions
from ballonet.hooks.prefix.store import PrefixStore

from ..models import build
from .conversations import BLOCK, outside

Ids = tuple[int, ...]
_TOKENS: Final = ("keys", "values", "is_initialized", "device", "dtype")  # of an elastic layer: not of its state


def own(value: Any) -> Any:
    """A copy that takes no memory of the pool."""
    if isinstance(value, torch.Tensor):
        return outside(value)
    return {key: own(each) for key, each in value.items()} if isinstance(value, dict) else value


def by_hand(layers: list[Any], empty: DynamicCache) -> DynamicCache:
    """A stock cache that holds the same."""
    cache = copy.deepcopy(empty)
    for stock, layer in zip(cache.layers, layers, strict=True):
        if not isinstance(layer, ElasticLayer):
            vars(stock).update({name: own(value) for name, value in vars(layer).items()})
            continue
        vars(stock).update(
            {name: own(vars(layer)[name]) for name in vars(stock) if name in vars(layer) and name not in _TOKENS}
        )
        if layer.is_initialized:
            stock.update(outside(layer.keys), outside(layer.values))
    return cache


def contents(layer: Any, but: Sequence[str]) -> list[torch.Tensor]:
    """All tensors that it holds, but for those of some attributes."""

    def tensors(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            for each in value.values():
                yield from tensors(each)

    return [tensor for name, value in sorted(vars(layer).items()) if name not in but for tensor in tensors(value)]


def differs(one: Sequence[int], other: Sequence[int]) -> bool:
    """Somewhere, as far as both go?"""
    return any(mine != theirs for mine, theirs in zip(one, other, strict=False))


@dataclass
class Talks:
    """A managed model with a store, and its stock twin. Every request is made of both and compared."""

    model: Any
    stock: Any
    managed: ballonet.Managed
    store: PrefixStore
    empty: DynamicCache  # of stock
    begun: dict[int, tuple[int, DynamicCache]] = field(default_factory=dict)  # by thread: columns, and what is in them
    held: list[tuple[Ids, DynamicCache]] = field(default_factory=list)  # by hand, and the tokens in them

    def ask(self, ids: list[int], new: int = 6, **options: Any) -> list[int]:
        """The tokens. What a request begins with is what stock had after exactly these tokens, and it goes on as stock
        does from there."""
        name = "cache_params" if "cache_params" in inspect.signature(self.stock.forward).parameters else ""
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, **options}
        prompt = torch.tensor([ids])
        self.begun.pop(get_ident(), None)
        result = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        tokens: list[int] = (result if isinstance(result, torch.Tensor) else result.sequences)[0].tolist()
        columns, began = self.begun.get(get_ident(), (0, None))
        if began is not None:
            assert columns < len(ids)
            self.is_known(began, tuple(ids[:columns]))
        for length in (1, new):
            going = copy.deepcopy(self.empty if began is None else began)
            given = prompt[:, columns:] if name else prompt
            settings |= {"max_new_tokens": length, "min_new_tokens": length, name or "past_key_values": going}
            found = self.stock.generate(given, attention_mask=torch.ones_like(given), **settings)
            found = found if isinstance(found, torch.Tensor) else found.sequences
            want = [*(ids[:columns] if name else ()), *found[0].tolist()]
            self.held.append((tuple(want[:-1]), going))
        assert tokens == want, "other tokens than with the same cache held by hand"
        return tokens

    def is_known(self, began: DynamicCache, ids: Ids) -> None:
        """States are those of stock behind exactly these tokens, and keys and values those of each of them, which
        another request may have computed: bit for bit."""
        exactly = [cache for tokens, cache in self.held if tokens == ids]
        for number, layer in enumerate(began.layers):
            growing = isinstance(layer, DynamicLayer) and not layer.is_sliding and layer.is_initialized
            state = contents(layer, but=("keys", "values") if growing else ())
            assert any(
                all(map(torch.equal, state, contents(cache.layers[number], but=("keys", "values") if growing else ())))
                for cache in exactly
            ), f"layer {number} never had that state"
            for token in range(len(ids) if growing else 0):
                pair = layer.keys[:, :, token], layer.values[:, :, token]
                assert any(
                    tokens[: token + 1] == ids[: token + 1]
                    and torch.equal(pair[0], cache.layers[number].keys[:, :, token])
                    and torch.equal(pair[1], cache.layers[number].values[:, :, token])
                    for tokens, cache in self.held
                ), f"layer {number}, token {token}: never computed like that"

    @property
    def reused(self) -> int:
        """Tokens that the last request of this thread did not compute."""
        return self.begun.get(get_ident(), (0, None))[0]

    def check(self) -> None:
        """What is kept has what it relies on, and nothing is kept that is of no use."""
        prefix_index = self.store.contents.index
        for state in prefix_index.states:
            assert prefix_index.blocks.index.owner(state.key) is state
            assert prefix_index.find_state(state.ids, state.salt, state.growing, peek=True)[1] is state
        for sequence in prefix_index.idle:
            assert sequence.needs_state
            assert not sequence.in_use
            start = (len(sequence.keys) - 1) * BLOCK
            assert prefix_index.blocks.index.after(sequence.keys[-1]) or any(
                min(len(state.ids), len(sequence.ids)) > start and not differs(state.ids, sequence.ids)
                for state in prefix_index.states
            )
        assert not self.model._forward_pre_hooks or len(self.model._forward_pre_hooks) == self.hooks

    hooks: int = 0  # that the model has when nothing runs


@contextmanager
def talks(
    monkeypatch: Any, name: str, *, chaos: int | None = None, manage: Any = None, **changes: Any
) -> Iterator[Talks]:
    """With the tiny model of that name. `changes`: of its configuration; `manage`: options. Released in the end."""
    model = build(name, **changes)
    stock = copy.deepcopy(model)
    managed = ballonet.manage(model, chaos=chaos, **{"prefix_cache": True, **(manage or {})})
    store = managed.prefixes
    assert store is not None
    store.contents.index.blocks.block = BLOCK
    empty = DynamicCache(config=stock.config.get_text_config(decoder=True))
    both = Talks(model, stock, managed, store, empty, hooks=len(model._forward_pre_hooks))
    prepared = sessions._Request.prepared

    def begin(request: Any, given: dict[str, Any]) -> None:
        prepared(request, given)
        if columns := request._lookup.columns:
            both.begun[get_ident()] = columns, by_hand(request._layers, empty)

    with monkeypatch.context() as patched:
        patched.setattr(sessions._Request, "prepared", begin)
        yield both
    managed.release()
