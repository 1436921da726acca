"""`manage()`: a model's weights in the pool, a lease around its forwards, the elastic cache under its `generate()`."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Literal, Self

import torch
from torch import nn

from ..allocator import install, runtime
from ..allocator._native import Device
from ..allocator.display import table
from ..allocator.errors import AlreadyManaged, ManageError
from ..allocator.units import format_size
from ..offload.chaos import Chaos
from ..offload.plan import Fewest, Interval, Rule, streaming
from ..offload.ring import Streamed
from .follow import Follower
from .forwards import Forwards
from .layers import decoder_layers
from .lease import ForwardLease
from .storages import members
from .streaming import Streaming
from .turns import Turns
from .weights import Weights, tenants_of

_managed: weakref.WeakKeyDictionary[nn.Module, Managed] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def manage(
    model: nn.Module, *, interval: int | Literal["auto"] | None = "auto", chaos: int | None = None, **unknown: object
) -> Managed:
    """Moves the weights of `model` into the pool and hooks it; `generate()` then uses the elastic KV cache. Undone by
    `release()`.

    Any module is accepted. Each decoder layer of a transformers model gets a range of its own; in other modules
    everything is resident. `interval`: of every so many decoder layers the last streams: its weights are on the host
    and come over while the layers before it compute (Select-N §4.3). "auto" streams as few layers as the budget
    demands, as a rule none; None never streams. A model whose layers stream is used under `torch.no_grad()`, as
    `generate()` does it, or is slow. `chaos`: a seed; random pages are moved while the model runs (default:
    BALLONET_CHAOS).

    Calls `ballonet.install()` with its defaults where that was not done. Called again for the same model it returns the
    same Managed.

    The model may be changed in every way that torch and transformers know. What is new in it (converted, assigned,
    resized weights, adapters, layers) is brought into the pool at its next forward; see `Managed.left`. Copies of it
    are not managed. Views of weights that were taken before keep the old memory, as with `Module.to`. A failure changes
    nothing.

    Raises ManageError (AlreadyManaged, WrongDevice), BudgetError, torch.OutOfMemoryError, DriverError, and what
    `install()` raises.
    """
    if unknown:
        options = ", ".join(map(repr, unknown))
        raise ManageError(f"manage() has no option {options}: it takes 'interval' and 'chaos'")
    if not isinstance(model, nn.Module):
        raise ManageError(f"manage() takes a torch.nn.Module, not {type(model).__name__}")
    if chaos is not None and (not isinstance(chaos, int) or isinstance(chaos, bool) or chaos < 0):
        raise ManageError(f"chaos is {chaos!r}: give a seed, a whole number that is not negative, or None")
    rule = _rule(model, interval)
    with _lock:
        managed = managed_as(model)
        if managed is not None and chaos in (None, managed.chaos and managed.chaos.seed):
            return managed
        _check_not_managed(model)
        if runtime.current() is None:
            install.install()
        seed = runtime.settings().chaos if chaos is None else chaos
        managed = Managed(model, runtime.require(), seed, rule)
        _managed[model] = managed
    return managed


def managed_as(model: nn.Module) -> Managed | None:
    """What `manage(model)` returned, None where the model is not managed."""
    return _managed.get(model)


class Managed:
    """A model whose weights lie in the pool. A context manager that releases it. Does not keep the model alive."""

    def __init__(self, model: nn.Module, device: Device, seed: int | None, rule: Rule) -> None:
        """As `manage()`, which checks the arguments first."""
        self._name = type(model).__name__
        self._model = weakref.ref(model)
        generators = _generators(model)
        with ExitStack() as undo:
            open_lease, self._detach = _attach_caches(model) if generators else (ForwardLease, _nothing)
            undo.callback(self._detach)
            self._weights = Weights(device)
            self._follower = Follower(self._weights)
            undo.callback(self._follower.close)
            layers = self._follower.adopt(model, rule)
            undo.callback(self._weights.restore, model)
            chaos = None if seed is None else Chaos(seed, device.host_pages)
            self._turns = Turns()
            self._streaming: Streaming | None = None
            self._behind = False  # was a look at the model broken off?
            self._forwards = Forwards(self._weights, chaos, open_lease, self._catch_up, self._turns)
            undo.callback(self._forwards.unhook)
            self._forwards.hook(dict.fromkeys((model, *generators)))
            self._forwards.hook_layers(layers)
            self._stream(model, layers)
            undo.pop_all()
        self._finalizer = weakref.finalize(model, self._collected)
        self._finalizer.atexit = False

    @property
    def model(self) -> nn.Module | None:
        """The model, None once it is collected."""
        return self._model()

    @property
    def released(self) -> bool:
        """Whether the model is managed no more: it was released, or collected."""
        return not self._finalizer.alive

    @property
    def pages(self) -> int:
        """Device pages that hold weights of this model: those that are really there, at this moment."""
        return self._weights.pages + (0 if self._streaming is None else self._streaming.slot_pages)

    @property
    def host_pages(self) -> int:
        """Host pages that hold the weights of its layers that stream."""
        return self._weights.host_pages

    @property
    def streamed(self) -> tuple[int, ...]:
        """The decoder layers that stream."""
        return tuple(self._weights.streamed())

    @property
    def flying(self) -> bool:
        """Do the addresses of those layers lead to slots now? See `resident`."""
        return self._streaming is not None and self._streaming.flying

    @property
    def left(self) -> dict[str, str]:
        """Tensors that are not in the pool's ranges -> why: those that cannot be moved, and what was changed since and
        could not be taken in again, as of the last look at the model, which is at the first forward after a change."""
        return dict(self._follower.left)

    @property
    def chaos(self) -> Chaos | None:
        """What moves pages at random, None where nothing does."""
        return self._forwards.chaos

    def resident(self) -> AbstractContextManager[None]:
        """Within it no layer streams, so that any reference to a weight can be read at any time, as can those that are
        taken through the model outside of it. ManageError, DriverError."""
        return self._turns.resident()

    def editable(self) -> AbstractContextManager[None]:
        """Within it any reference to a weight can be written, as can those that are taken through the model outside of
        it. ManageError, DriverError."""
        return self.resident()  # a streamed layer's twin is the only copy there is

    def release(self) -> None:
        """Gives the model back as it was: the same tensors, in torch's own memory, without hooks. Again: does nothing.

        All or nothing: raises ManageError while a forward of the model runs, torch.OutOfMemoryError where torch has
        no room for one more layer, DriverError; the model is then managed as before.
        """
        self._check_not_running()
        with self._turns.at_rest(), _lock:  # in this order: a forward that looks at its model has the turn
            model = self._model()
            if self.released or model is None:
                return
            self._check_not_running()
            self._behind = True  # should it fail: layers stream again from the next forward on
            self._stop_streaming()
            self._weights.restore(model)
            self._follower.close()
            self._detach()
            self._forwards.unhook()
            self._finalizer.detach()
            _managed.pop(model, None)

    def _check_not_running(self) -> None:
        if not self.released and self._forwards.running():
            raise ManageError(f"a forward of {self._name} is running: release() it afterwards")

    def _collected(self) -> None:
        """The model is gone. Its ranges go with its tensors; what it was made of may live on, without hooks."""
        self._follower.close()
        self._forwards.forget()
        self._forwards.unhook()
        self._detach()
        self._stop_streaming()
        self._weights.forget()

    def _catch_up(self) -> None:
        """An outermost forward begins, which holds a lease already."""
        if self._pending:
            with _lock:
                model = None if self.released else self._model()
                # Whoever comes by later sees that there is something to do and waits for the lock.
                if model is not None and self._weights.group.leases == 1 and self._pending:
                    self._behind = True
                    self._stop_streaming()
                    self._follower.catch_up(model)
                    layers = decoder_layers(model)
                    self._forwards.hook_layers(layers)
                    self._stream(model, layers)
                    self._behind = False

    @property
    def _pending(self) -> bool:
        """Is there to be a look at the model?"""
        return self._behind or self._follower.pending

    def _stream(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Streams the layers whose weights are on the host, if there are any."""
        parts = {
            layer: each
            for layer, each in self._weights.streamed().items()
            if not isinstance(layers[layer], torch.jit.ScriptModule)  # which can have no hooks: it stays at rest
        }
        if not parts:
            return
        pages = [sum(part.count for part in parts.get(layer, ())) for layer in range(len(layers))]
        plan = streaming(pages, tuple(parts), self._follower.slots)
        streamed = [Streamed(layer, slot, parts[layer]) for layer, slot in zip(plan.streamed, plan.slots, strict=True)]
        modules = {layer: layers[layer] for layer in plan.streamed}
        weights = self._weights
        tenants = tenants_of(weights.all_ranges(), members(model, layers))
        homes = {part.home.address for each in parts.values() for part in each}
        storages = len({member.tensor.untyped_storage()._cdata for member, _ in tenants})
        self._streaming = Streaming(
            weights.device,
            weights.group,
            self._turns,
            plan.slot_pages,
            streamed,
            modules,
            {id(member.tensor) for member, opened in tenants if opened.address in homes},
            lambda: weights.storages != storages,
            weights.stream,
        )
        self._turns.passes = self._streaming

    def _stop_streaming(self) -> None:
        """Its layers are at rest then. ManageError, DriverError; nothing has changed then."""
        streaming = self._streaming
        if streaming is not None:
            with self._turns.at_rest():
                self._turns.passes = self._streaming = None
                streaming.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self.released:
            return f"<Managed {self._name}: {self._end()}>"
        weights = f"{self.pages} pages ({format_size(self.pages * self._weights.device.page_size)}) of weights"
        streamed = f", {len(self.streamed)} of them streamed" if self.streamed else ""
        return f"<Managed {self._name}: {self._forwards.layers} decoder layers{streamed}, {weights}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        if self.released:
            return table(f"{self._name}: {self._end()}", ("of the model", ""), ())
        page = self._weights.device.page_size
        rows: list[tuple[str, object, str]] = [
            ("decoder layers", self._forwards.layers, ""),
            ("weights", f"{self.pages:,} pages", format_size(self.pages * page)),
        ]
        if self.streamed:
            rows.append(("layers that stream", len(self.streamed), ""))
            rows.append(("weights on the host", f"{self.host_pages:,} pages", format_size(self.host_pages * page)))
        rows += [(f"left: {name}", why, "") for name, why in self.left.items()]
        return table(self._name, ("of the model", "", "memory"), rows)

    def _end(self) -> str:
        return "collected" if self._model() is None else "released"


def _rule(model: nn.Module, interval: object) -> Rule:
    """ManageError where there is no such interval."""
    if interval == "auto":
        return Fewest()
    layers = len(decoder_layers(model))
    if interval is not None and (type(interval) is not int or not 1 <= interval <= layers):
        raise ManageError(
            f"interval is {interval!r}: give a whole number from 1 (all layers stream) to {layers}, the number of "
            f'decoder layers of {type(model).__name__}, or "auto", or None'
        )
    return Interval(interval)


def _check_not_managed(model: nn.Module) -> None:
    parts = {id(module) for module in model.modules()}
    for other in list(_managed):
        if other is model:
            raise AlreadyManaged(
                f"this {type(model).__name__} is managed already: release() what manage() returned first"
            )
        if any(id(module) in parts for module in other.modules()):
            raise AlreadyManaged(
                f"{type(model).__name__} has a part in common with a {type(other).__name__} that is managed already: "
                "manage the one that contains both, or release() the other first"
            )


def _generators(model: nn.Module) -> list[nn.Module]:
    """The parts of `model` that generate text the way transformers does: as a rule it alone. Some have such a model
    inside and call only that."""
    transformers = sys.modules.get("transformers.generation.utils")
    if transformers is None:
        return []
    return [module for module in model.modules() if isinstance(module, transformers.GenerationMixin)]


def _nothing() -> None:
    """What is to be undone of a cache that was not attached."""


def _attach_caches(model: nn.Module) -> tuple[Callable[[], ForwardLease], Callable[[], object]]:
    """Makes the caches that it builds elastic. Returns what opens the lease of a forward of it, and what undoes all."""
    from . import generation  # imports transformers, which other modules can do without

    detach = generation.attach(model)
    alive = weakref.ref(model)

    def open_lease() -> ForwardLease:
        module = alive()
        return ForwardLease() if module is None else generation.forward_entered(module)

    return open_lease, detach
