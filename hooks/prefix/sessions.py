"""Follows `generate()` of models that keep prefixes: it starts from stored tokens, and keeps its own.

Note [Stock code does everything]
    The cache that `generate()` has just made (hooks/kv/generation.py, Note [Around generate]) is filled with the stored
    beginning of the prompt, which is the documented way to go on from a cache. When it returns, the layers are kept. So
    the result is that of a `DynamicCache` held by hand.

Note [Whose cache]
    Layers are kept as they are if no other code can have them: one sequence without padding, and the cache is freed
    when `generate()` has returned. Otherwise each sequence is copied to new layers.

Note [Where the prompt ends]
    An answer is often changed before it comes again in a longer prompt: templates leave out a model's reasoning, or
    write an answer in another way. But the prompt comes again unchanged. So of a model whose layers keep a state, that
    where the prompt ends is kept beside that of the end. It is copied when the forward that has read the last token of
    the prompt returns.

Note [Models of states alone]
    `generate()` gives such a model (Mamba) the whole prompt, whatever its cache holds; a user who holds its cache by
    hand passes only the new tokens. So does the hook here, in front of the first forward.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...allocator.errors import BallonetError, PoolExhausted
from ...allocator.interrupts import Finalizer, guarded
from ...allocator.patches import SharedPatch, Undo
from ..cache_argument import CACHE_NAMES, given_cache
from ..compat import (
    PLAIN_MODES,
    DynamicCache,
    NoAttention,
    computes_whole_prompt,
    length_of_positions,
    slices_prompt,
    takes_positions,
)
from ..forward.hook_base import Hook, remove_all
from ..kv import generation
from ..kv.layer import ElasticLayer
from ..kv.ranges import CacheRanges
from .contents import Lookup
from .identity import Identity
from .sequence import CachedSequence, taken_out
from .snapshot import STATES, StateSnapshot, is_recurrent, keeps_state, state_affects_logits
from .store import PrefixStore, numbers

_FAILURES = (BallonetError, PoolExhausted, torch.OutOfMemoryError)
# Arguments of a model on which keys and values do not depend, or which are checked below
_KNOWN: Final = frozenset(
    {"attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep", "return_dict"}
)
_KEPT: Final = (ElasticLayer, *STATES)  # layers that hold keys and values of every token, or a state
_DYNAMIC: Final = (None, "dynamic")
_BY_TOKEN: Final = ("input_ids", "attention_mask")  # arguments with a column for each token


class _Thread(threading.local):
    uses_stores = True


_thread: Final = _Thread()


def attach(model: nn.Module, store: PrefixStore) -> Callable[[], object]:
    """Makes `generate()` of the model use the store until the returned function is called (idempotent) or the model is
    collected."""
    _stores.add(id(model), store)
    detach = generation.follow(model, partial(_request, store))
    return Finalizer(model, detach, partial(_stores.remove, id(model)))


def without_stores() -> AbstractContextManager[None]:
    """A `with` block in which `generate()` on this thread computes whole prompts, and keeps no tokens."""
    before = _thread.uses_stores

    def begin() -> None:
        _thread.uses_stores = False

    def end(failed: bool) -> None:
        _thread.uses_stores = before

    return guarded(begin, end)


def _replace() -> Iterator[Undo]:
    yield register_optimizer_step_post_hook(_stepped).remove


_stores: Final = SharedPatch[PrefixStore](_replace)  # by the id of a live model


def _stepped(optimizer: Any, *_: Any) -> None:
    """Notes an optimizer's step, see identity.py, Note [Weights and settings]."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for store in _stores.users:
        store.looks.stepped(parameters)


def _request(store: PrefixStore, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Request | None:
    return _Request(store, model, args, kwargs) if _thread.uses_stores else None


class _Request:
    """One call of `generate()`."""

    def __init__(self, store: PrefixStore, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.model = model
        self._store = store
        store.filler.begin_request()
        self._user = kwargs
        self._ids: Any = next(
            (ids for ids in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if ids is not None), None
        )
        self._lookup = Lookup()
        Finalizer(self, partial(store.contents.lose, self._lookup))
        self._now: Identity | None = None  # where the store was asked
        self._layers: list[Any] = []
        self._pads: list[int] = []
        self._cache: Callable[[], Any] = _nothing
        self._beams = 1
        self._ends: frozenset[int] = frozenset()
        self._watch: Watch | None = None  # where layers keep a state

    def prepared(self, given: dict[str, Any]) -> None:
        """Fills the cache from the store: implements `generation.GenerateCall`."""
        config, kwargs = given["generation_config"], given["model_kwargs"]
        expand = max(config.num_beams or 1, config.num_return_sequences or 1)
        ids = self._ids if isinstance(self._ids, torch.Tensor) else None
        if reason := why_not(self.model, ids, self._user, given, expand):
            self._store.counts.why_not[reason] += 1
            return
        assert ids is not None
        mask = kwargs.get("attention_mask")
        pads = [0] * len(ids) * expand if mask is None else (mask == 0).sum(dim=1).tolist()
        rows = [row for row in map(numbers, ids) for _ in range(expand)]
        cache = given_cache(kwargs)
        self._beams = config.num_beams or 1
        self._ends = _ends(config.eos_token_id)
        self._pads = pads
        now = self._store.identity()
        if keeps_state(cache.layers):
            self._fill_with_state(cache, rows[0], now)
            return
        self._now = now
        with torch.no_grad():
            self._store.filler.fill(
                self._lookup,
                cache.layers,
                [row[pad:] for row, pad in zip(rows, pads, strict=True)],
                pads,
                now,
                movable=not config.return_dict_in_generate,
            )
        self._layers = list(cache.layers)
        self._cache = weakref.ref(cache)

    def _fill_with_state(self, cache: Any, row: array[int], now: Identity) -> None:
        """Fills a cache with states, see snapshot.py, Note [State snapshots]."""
        proof = partial(state_affects_logits, self.model, row) if is_recurrent(cache.layers) else None
        if not self._store.filler.resumes_from_state(now, proof):
            self._store.counts.why_not["the model does not go on from a state with several tokens"] += 1
            return
        self._now = now
        with torch.no_grad():
            self._store.filler.fill_with_state(self._lookup, cache.layers, row, now)
        self._layers = list(cache.layers)
        self._cache = weakref.ref(cache)
        self._watch = Watch(self.model, cache, row, now.settings)
        self._watch.begin(self._lookup.columns)

    def ended(self, result: Any) -> None:
        """Keeps the request's tokens. `result`: of `generate()`."""
        if self._now is None:
            return
        tokens = result if isinstance(result, torch.Tensor) else result.sequences
        try:
            with torch.no_grad():
                if self._watch is None:
                    self._keep(tokens, self._now)
                else:
                    self._watch.end()
                    self._keep_states(numbers(tokens), self._now, self._watch)
        except _FAILURES as error:
            self._store.counts.why_not[f"storing failed: {type(error).__name__}"] += 1
            self.broken_off()

    def broken_off(self) -> None:
        """Gives back the sequence of a request that raised. The cache in the exception's frames loses it."""
        if self._watch is not None:
            self._watch.end()
        sequence, now = self._lookup.sequence, self._now
        if sequence is not None and now is not None:
            if (cache := self._cache()) is not None:
                cache.layers = []
            with suppress(*_FAILURES):
                self._store.contents.give_back(sequence, now)
                self._lookup.sequence = None

    def _keep(self, tokens: torch.Tensor, now: Identity) -> None:
        """Keeps the sequences of these tokens, prompts and answers, int[sequences, tokens]."""
        lookup, step = self._lookup, self._beams
        held = self._cache() is not None
        ids = list(map(numbers, self._ids if step > 1 else tokens))
        known = min(len(ids[0]), *(layer.get_seq_length() for layer in self._layers if layer.is_initialized))
        if self._store.identity() != now:
            self._drop()
        elif len(ids) == 1 and step == 1 and not self._pads[0] and not held:
            sequence = lookup.sequence or CachedSequence(self._layers, (), now.settings)
            sequence.ids = ids[0][:known]
            self._give(sequence, now)
        else:
            for number, row in enumerate(ids):
                pad = self._pads[number * step]
                row = _up_to_end(row[pad:known], len(self._ids[0]) - pad, self._ends)
                if self._store.contents.has_new_blocks(row, now):
                    ranges = CacheRanges.of(self.model.config, len(self._layers), len(row), alone=True)
                    layers = taken_out(self._layers, number * step, pad, pad + len(row), ranges)
                    self._drop()  # the layers that it had moved belong to the user's cache now
                    self._give(CachedSequence(layers, row, now.settings), now)
            self._drop()

    def _keep_states(self, ids: array[int], now: Identity, watch: Watch) -> None:
        """Keeps the states behind the prompt and behind the last token that was read, where the model keeps them in its
        cache, with the tokens before them. `ids`: of the prompt and the answer."""
        growing = [layer for layer in self._layers if isinstance(layer, ElasticLayer)]
        ids, why = ids[: watch.read], ""
        if watch.read > len(ids) or any(layer.get_seq_length() != len(ids) for layer in growing):
            why = "it is not known which tokens its layers have read"
        held = self._cache() is not None
        states = [] if why or watch.at_prompt is None else [watch.at_prompt]
        if not why and watch.read > len(watch.prompt):
            last = StateSnapshot.of(self._layers, ids, now.settings, move=not held)
            states += [last] if last is not None else []
        if not states:
            self._store.counts.why_not[why or "a layer keeps its state outside of the cache"] += 1
        elif self._store.contents.saver is not None:
            self._store.counts.why_not["windows and states are not saved in files"] += 1
        if not states or self._store.identity() != now:
            self._drop()
        elif not growing:
            self._store.contents.keep(None, now, states)
        elif held:
            ranges = CacheRanges.of(self.model.config, len(growing), len(ids), alone=True)
            layers = taken_out(self._layers, 0, 0, len(ids), ranges)
            self._drop()
            self._give(CachedSequence(layers, ids, now.settings, needs_state=True), now, states)
        else:
            sequence = self._lookup.sequence or CachedSequence(self._layers, (), now.settings, needs_state=True)
            sequence.ids = ids
            self._give(sequence, now, states)

    def _give(self, sequence: CachedSequence, now: Identity, states: Sequence[StateSnapshot] = ()) -> None:
        self._lookup.sequence = sequence
        self._store.contents.keep(sequence, now, states)
        self._lookup.sequence = None

    def _drop(self) -> None:
        """Drops the sequence; its layers stay in the user's cache, if that still exists."""
        if (sequence := self._lookup.sequence) is not None:
            if self._cache() is not None:
                sequence.layers.clear()
            self._store.contents.drop(sequence)
            self._lookup.sequence = None


def why_not(
    model: Any, ids: torch.Tensor | None, user: Mapping[str, Any], given: Mapping[str, Any], expand: int
) -> str:
    """Returns why a call is left alone; empty where it is not.

    `ids`: of the prompts, int[sequences, tokens]. `user`: the keyword arguments of `generate()`. `given`: those of the
    method that prepares the cache. `expand`: sequences that are generated for each prompt.
    """
    config, kwargs = given["generation_config"], given["model_kwargs"]
    cache = given_cache(kwargs)
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if given_cache(user) is not None:
        return "a cache was given"
    if not config.use_cache:
        return "use_cache is off"
    if config.cache_implementation not in _DYNAMIC or type(cache) is not DynamicCache:
        return "the cache is not dynamic"
    if ids is None or ids.dim() != 2 or ids.is_floating_point():
        return "no input_ids were given"
    if given["generation_mode"] not in PLAIN_MODES or user.get("custom_generate") is not None:
        return "neither sampling, greedy nor beam search"
    if config.is_assistant or config.token_healing:
        return "an assistant, or token healing"
    if not slices_prompt(config, kwargs, ids.shape[1]):
        return "this transformers would prefill the whole prompt"
    if user.get("position_ids") is not None:
        return "position_ids was given"
    if unknown := sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN):
        return f"{unknown[0]} was given"
    length = length_of_positions(model)
    if length is not None and max(ids.shape[1], int(given.get("max_cache_length") or 0)) > length:
        return "the positions depend on how long the sequence gets"
    if model.training:
        return "the model is in training mode"
    if _prompt_learning(model):
        return "the adapter puts tokens before the prompt"
    if not any(type(layer) in _KEPT for layer in cache.layers):
        return "no layer of the cache is elastic"
    if not all(type(layer) in (*_KEPT, NoAttention) for layer in cache.layers):
        return "layers keep more than keys, values and states"
    mask = kwargs.get("attention_mask")
    if keeps_state(cache.layers):
        if ids.shape[0] * expand > 1:
            return "several sequences, of which layers keep a window or a state"
        if mask is not None and not bool((mask != 0).all()):
            return "an attention mask, where layers keep a window or a state"
        if computes_whole_prompt(cache) and getattr(model, "_compiled_call_impl", None) is not None:
            return "the whole prompt is computed in a compiled graph"
    return "" if mask is None else _mask(model, mask, ids, expand)


def _mask(model: Any, mask: torch.Tensor, ids: torch.Tensor, expand: int) -> str:
    if tuple(mask.shape) != (ids.shape[0] * expand, ids.shape[1]):
        return "the attention mask has another shape"
    ones = mask == 1
    if not bool((ones | (mask == 0)).all()):
        return "the attention mask says more than which tokens count"
    if not bool((ones[:, 1:] >= ones[:, :-1]).all()) or not bool(ones[:, -1].all()):
        return "the attention mask is more than padding on the left"
    if not bool(ones.all()) and not takes_positions(model):
        return "padding moves the positions of this model"
    return ""


def _prompt_learning(model: Any) -> bool:
    """Does peft call `generate()` for an adapter that is made of tokens?"""
    preparing = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(getattr(preparing, "__self__", None), "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))


def _up_to_end(row: array[int], prompt: int, ends: frozenset[int]) -> array[int]:
    """Returns the row up to the first generated end token."""
    return row[: next((n + 1 for n in range(prompt, len(row)) if row[n] in ends), len(row))]


def _ends(tokens: Any) -> frozenset[int]:
    if tokens is None:
        return frozenset()
    return frozenset({tokens} if isinstance(tokens, int) else tokens)


def _nothing() -> None:
    """The weak reference's value for a request without a cache."""


class Watch:
    """Watches the forwards that are given one cache, until `end`, or until it is collected."""

    def __init__(self, model: Any, cache: Any, prompt: Sequence[int], salt: bytes) -> None:
        """`prompt`: tokens."""
        self.read = 0  # tokens that the layers stand behind
        self.at_prompt: StateSnapshot | None = None
        self._model = model
        self._reads_all = computes_whole_prompt(cache)
        self._cache = weakref.ref(cache)
        self.prompt = prompt
        self._salt = salt
        self._surplus = 0  # first tokens of the next forward that the cache has already
        self._handles: list[RemovableHandle] = []
        self._remove = Finalizer(self, partial(remove_all, self._handles))

    def begin(self, columns: int) -> None:
        """Begins with a cache of so many tokens, before the first forward."""
        self.read = columns
        self._surplus = columns if self._reads_all else 0
        before, after = _Before(self), _After(self)
        self._handles.append(self._model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(after, with_kwargs=True))

    def end(self) -> None:
        """Ends the watch. Idempotent."""
        self._remove()

    def cut(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the forward's arguments without tokens that the cache has."""
        if not self._surplus or not self._ours(kwargs):
            return kwargs
        surplus, self._surplus = self._surplus, 0
        return kwargs | {name: kwargs[name][:, surplus:] for name in _BY_TOKEN if kwargs.get(name) is not None}

    def note(self, kwargs: dict[str, Any]) -> None:
        """Notes that a forward has returned."""
        cache, ids = self._cache(), kwargs.get("input_ids")
        if cache is None or ids is None or not self._ours(kwargs):
            return
        self.read += ids.shape[1]
        if self.read == len(self.prompt):
            with suppress(torch.OutOfMemoryError), torch.no_grad():
                self.at_prompt = StateSnapshot.of(cache.layers, self.prompt, self._salt, move=False)

    def _ours(self, kwargs: dict[str, Any]) -> bool:
        """Is the forward one with this cache? Other threads may run the model as well."""
        cache = given_cache(kwargs)
        return cache is not None and cache is self._cache()


class _Before(Hook):
    """The hook before a forward. While another thread removes it, it may be called without keyword arguments."""

    def __init__(self, watch: Watch) -> None:
        """Does not keep it alive."""
        self._watch = weakref.ref(watch)

    def __call__(self, *given: Any) -> Any:
        watch = self._watch()
        if torch.compiler.is_compiling() or watch is None or len(given) < 3:
            return None
        _, args, kwargs = given
        return args, watch.cut(kwargs)


class _After(_Before):
    """The hook after a forward."""

    def __call__(self, *given: Any) -> None:
        watch = self._watch()
        if not torch.compiler.is_compiling() and watch is not None and len(given) == 4:
            watch.note(given[2])
