"""How a managed model gets elastic KV layers with no argument: in `generate()`, when a forward makes a cache, and when
it is given one that the program has made.

Note [Who builds the cache]
    `generate()` and forwards call `DynamicCache(config=...)`, which looks up the class of each layer in a table of
    transformers; an encoder-decoder model does so twice. While any model is attached, the entries whose class has an
    elastic counterpart (`kinds`) are ballonet's functions: they make elastic layers if an attached model is building a
    cache on this thread, and call the replaced entry otherwise. A model is building between the entry and exit of its
    forward (`ModelLease`), and within `_prepare_cache_for_generation`. That method is wrapped on the class that has it,
    as a rule GenerationMixin, so that the model itself holds nothing that a copy or a pickle of it would take along.
    The cache's own type stays `DynamicCache`. One that the program has made (transformers' recipe for a shared prompt,
    a loop written by hand) has its layers made elastic, in place, when a forward of the model begins. When the last
    model is detached everything is undone; where other code has wrapped ballonet's function meanwhile, that stays below
    and passes calls on.

Note [Around generate]
    Kept prefixes and pieces have to know of each call of `generate()`. While there is any of them it is wrapped, on the
    class, so that the model itself holds nothing; with the last one the wrapper is removed. If another one has been put
    around it meanwhile, it stays below and passes calls on.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.errors import AlreadyManaged
from ...allocator.interrupts import Finalizer, guarded
from ...allocator.patches import SharedPatch, Undo
from ...offload.timeline.recorder import mark
from ..compat import PREPARE_CACHE, GenerationMixin, layer_types
from ..device.references import label
from ..forward.lease import ForwardLease, caches, opened
from .cache import ELASTIC, elastic_numbers, make_given_elastic, reason_to_leave
from .layer import ElasticLayer
from .ranges import CacheRanges

_ELASTIC = (None, "dynamic")  # values of `cache_implementation` that mean a cache which grows on the device


class Building:
    """Makes the elastic layers of the caches that a managed model builds."""

    def __init__(self, config: Any, alone: bool, device: Device | None, name: str, expected: int = 0) -> None:
        """`name`: of the model, for logs. `expected`: tokens that a sequence will reach in the first cache, 0 if
        unknown. The others: see `attach`."""
        self._name = name
        self._config = config
        self._alone = alone
        self._device = device
        self._expected = expected
        self._ranges: CacheRanges | None = None
        self._left: list[int] = []  # numbers of the layers that the present cache still lacks

    def layer(self, stock: type, **kwargs: Any) -> ElasticLayer:
        """Makes the next layer, in the place of one of the class `stock`, over the ranges of its cache."""
        if self._ranges is None or not self._left:
            self._left = elastic_numbers(self._config) or [0]
            self._ranges = self._ranges_of(len(self._left))
        return ELASTIC[stock](self._ranges, number=self._left.pop(0), **kwargs)

    def take(self, cache: Any) -> None:
        """Makes a cache elastic that the program has made, as `cache.make_given_elastic` says."""
        make_given_elastic(cache, self._config, self._ranges_of)

    def _ranges_of(self, layers: int) -> CacheRanges:
        ranges = CacheRanges.of(self._config, layers, self._expected, self._alone, self._device)
        ranges.whose = self._name
        self._expected = 0  # a second cache is as long as the encoder's output
        return ranges


class GenerateCall(Protocol):
    """Is told of one call of `generate()` of `model`, on its thread."""

    model: Any

    def prepared(self, given: dict[str, Any]) -> None:
        """Called once the first cache of the call was made. `given`: the arguments of PREPARE_CACHE by name."""

    def ended(self, result: Any) -> None:
        """Called with what `generate()` is about to return."""

    def broken_off(self) -> None:
        """Called where it raises."""


class _Counted:
    """A call that is counted until it has ended."""

    def __init__(self, calls: weakref.WeakSet[_Counted], model: Any) -> None:
        self.model = model
        self._calls = calls
        calls.add(self)  # one that Ctrl-C broke off goes with its frame

    def prepared(self, given: dict[str, Any]) -> None:
        """Does nothing: implements `GenerateCall`."""

    def ended(self, result: Any) -> None:
        self._calls.discard(self)

    def broken_off(self) -> None:
        self._calls.discard(self)


# Makes what is told of a call of `generate(*args, **kwargs)` of `model`, from `(model, args, kwargs)`; None for one
# that need not be told of.
Follow = Callable[[Any, tuple[Any, ...], dict[str, Any]], GenerateCall | None]


class _Thread(threading.local):
    calls: tuple[GenerateCall, ...] = ()  # that run, the innermost last
    waiting: tuple[GenerateCall, ...] = ()  # those of them whose models' first cache was not made yet


class _Attached(NamedTuple):
    """A model that builds caches: the configuration of its text part, whether single layers of a cache are moved apart,
    its device and its name."""

    config: Any
    alone: bool
    device: Device | None
    name: str


_thread: Final = _Thread()


def attach(model: nn.Module, device: Device | None = None, *, alone: bool = False) -> Callable[[], object]:
    """Makes the caches that `model`, or a model inside it, builds elastic, until the returned idempotent function is
    called or the model is collected.

    Models that do not decode with a `DynamicCache` are left as they are. `device`: whose pages caches get, None for the
    first runtime's. `alone`: single layers of the cache are streamed, offloaded or dropped, so they share no pages.
    Raises AlreadyManaged, UnsupportedVersion.
    """
    parts = [part for part in model.modules() if not reason_to_leave(type(part), getattr(part, "config", None))]
    if not parts:
        return lambda: None
    with _attached.lock:
        if any(_attached.get(id(part)) for part in (model, *parts)):
            raise AlreadyManaged(f"this {type(model).__name__} is attached already: release the first Managed before")
        _attached.add(id(model), _Attached(parts[0].config, alone, device, label(model)))
        for part in parts:
            _attached.add(id(part), _Attached(part.config, alone, device, label(model)))
            for owner in type(part).__mro__:
                if PREPARE_CACHE in vars(owner):
                    _attached.also(owner, partial(_patch_preparation, owner))
    finalizers = [Finalizer(part, partial(_attached.remove, id(part))) for part in dict.fromkeys((model, *parts))]

    def detach() -> None:
        for finalizer in finalizers:
            finalizer()

    return detach


class ModelLease(ForwardLease):
    """The lease of a forward of a managed model, which may build caches, or of the method that prepares one for it.
    Open it on the thread of that call when it begins, and close it when it ends."""

    @cached_property
    def building(self) -> Building | None:
        """Makes elastic layers; None where the model is not attached."""
        known = _attached.get(id(self.model()))
        return None if known is None else Building(*known)

    def begin(self, cache: Any) -> None:
        if (building := self.building) is not None:
            building.take(cache)
            caches.add(id(cache))
            Finalizer(cache, partial(caches.discard, id(cache)))


def _building() -> Building | None:
    """Returns the `Building` of the innermost forward on this thread."""
    return next((lease.building for lease in opened() if isinstance(lease, ModelLease)), None)


def follow(model: nn.Module, make: Follow) -> Callable[[], object]:
    """Has each call of `generate()` of the model told to what `make` returns, until the returned idempotent function is
    called or the model is collected. See Note [Around generate]."""
    key = id(make)
    _followed.add(key, (id(model), make))
    return Finalizer(model, partial(_followed.remove, key))


def count_calls(model: nn.Module) -> tuple[Callable[[], int], Callable[[], object]]:
    """Returns (what counts the calls of `generate()` that run, of the model or one inside it, on any thread; what ends
    the counting)."""
    calls = weakref.WeakSet[_Counted]()
    models = [part for part in model.modules() if isinstance(part, GenerationMixin)]
    detaching = [follow(part, lambda of, args, kwargs: _Counted(calls, of)) for part in models]
    return lambda: len(calls), lambda: [detach() for detach in detaching]


def running() -> tuple[GenerateCall, ...]:
    """The calls of `generate()` that run on this thread, the innermost last."""
    return _thread.calls


def _patch_generate() -> Iterator[Undo]:
    owner: Any = GenerationMixin
    stock = vars(owner)["generate"]

    @functools.wraps(stock)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        # First, so that a compiler that traces this sees nothing else.
        if torch.compiler.is_compiling():
            return stock(model, *args, **kwargs)
        made = [make(model, args, kwargs) for of, make in _followed.users if of == id(model)]
        calls = [call for call in made if call is not None]
        if not calls:
            return stock(model, *args, **kwargs)
        before, waiting = _thread.calls, _thread.waiting

        def begin() -> None:
            _thread.calls, _thread.waiting = (*before, *calls), (*waiting, *calls)

        def end(failed: bool) -> None:
            _thread.calls, _thread.waiting = before, waiting

        try:
            with guarded(begin, end):
                result = stock(model, *args, **kwargs)
        except BaseException:
            for call in reversed(calls):
                call.broken_off()
            raise
        for call in reversed(calls):
            call.ended(result)
        return result

    def undo() -> None:
        if vars(owner).get("generate") is generate:
            owner.generate = stock

    owner.generate = generate
    yield undo


_followed: Final = SharedPatch[tuple[int, Follow]](_patch_generate)  # by the id of what makes the calls


def _replace_layers() -> Iterator[Undo]:
    table = layer_types()
    for kind, stock in list(table.items()):
        if inspect.unwrap(stock) in ELASTIC:
            yield _patch_layer_type(table, kind)


_attached: Final = SharedPatch[_Attached](_replace_layers)  # by the id of a live model


def _patch_layer_type(table: dict[str, Any], kind: str) -> Callable[[], None]:
    stock = table[kind]
    stock_class = inspect.unwrap(stock)

    def layer(**kwargs: Any) -> Any:
        # First, so that a compiler that traces this sees nothing else.
        if torch.compiler.is_compiling() or (building := _building()) is None:
            return stock(**kwargs)
        return building.layer(stock_class, **kwargs)

    def undo() -> None:
        if table[kind] is layer:
            table[kind] = stock

    vars(layer)["__wrapped__"] = stock
    table[kind] = layer
    return undo


def _patch_preparation(owner: type) -> Callable[[], None]:
    stock: Callable[..., Any] = vars(owner)[PREPARE_CACHE]
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def prepare(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(model, *args, **kwargs).arguments
        known = _attached.get(id(model))
        if known is not None:
            mark("generate()", known.device)
        if getattr(given.get("generation_config"), "cache_implementation", None) not in _ELASTIC:
            known = None
        # The greatest length of the cache: the last token generated is never put into it.
        expected = int(given.get("max_cache_length") or 0)
        told = [call for call in _thread.waiting if call.model is model]
        if told:  # caches that are made within the stock method are not reported
            _thread.waiting = tuple(call for call in _thread.waiting if call.model is not model)
        preparing = ModelLease()
        preparing.building = None if known is None else Building(*known, expected)
        preparing.open()
        try:
            result = stock(model, *args, **kwargs)
        finally:
            preparing.close()
        for call in told:
            call.prepared(given)
        return result

    def undo() -> None:
        if vars(owner).get(PREPARE_CACHE) is prepare:
            setattr(owner, PREPARE_CACHE, stock)

    setattr(owner, PREPARE_CACHE, prepare)
    return undo
