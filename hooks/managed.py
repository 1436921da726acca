"""`manage()`: a model's weights in the pool, a lease around its forwards, the elastic cache under its `generate()`."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from torch import nn

from ..allocator import install, runtime
from ..allocator._native import Device
from ..allocator.errors import AlreadyManaged, ManageError
from ..allocator.units import format_size
from ..offload.chaos import Chaos
from .forwards import Forwards
from .layers import decoder_layers
from .lease import ForwardLease
from .weights import adopt

_managed: weakref.WeakKeyDictionary[nn.Module, Managed] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def manage(model: nn.Module, *, chaos: int | None = None, **unknown: object) -> Managed:
    """Moves the weights of `model` into the pool and hooks it; `generate()` then uses the elastic KV cache. Undone by
    `release()`.

    Any module is accepted. Each decoder layer of a transformers model gets a range of its own; in other modules
    everything is resident. Calls `ballonet.install()` with its defaults where that was not done. `chaos`: a seed;
    random pages are moved while the model runs (default: BALLONET_CHAOS).

    Views of weights that were taken before keep the old memory, as with `Module.to`. A failure changes nothing.
    Raises ManageError (AlreadyManaged, WrongDevice), BudgetError, torch.OutOfMemoryError, DriverError, and what
    `install()` raises.
    """
    if unknown:
        raise ManageError(f"manage() has no option {', '.join(map(repr, unknown))}: it takes 'chaos'")
    if not isinstance(model, nn.Module):
        raise ManageError(f"manage() takes a torch.nn.Module, not {type(model).__name__}")
    if chaos is not None and (not isinstance(chaos, int) or isinstance(chaos, bool) or chaos < 0):
        raise ManageError(f"chaos is {chaos!r}: give a seed, a whole number that is not negative, or None")
    with _lock:
        _check_not_managed(model)
        if runtime.current() is None:
            install.install()
        seed = runtime.settings().chaos if chaos is None else chaos
        managed = Managed(model, runtime.require(), seed)
        _managed[model] = managed
    return managed


class Managed:
    """A model whose weights lie in the pool. A context manager that releases it. Does not keep the model alive."""

    def __init__(self, model: nn.Module, device: Device, seed: int | None) -> None:
        """As `manage()`, which checks the arguments first."""
        layers = decoder_layers(model)
        self._name = type(model).__name__
        self._layers = len(layers)
        self._model = weakref.ref(model)
        generator = _generator(model)
        with ExitStack() as undo:
            open_lease, self._detach = (ForwardLease, _nothing) if generator is None else _attach_cache(generator)
            undo.callback(self._detach)
            self._weights = adopt(model, layers, device)
            undo.callback(self._weights.restore, model)
            chaos = None if seed is None else Chaos(seed, device.host_pages)
            self._forwards = Forwards(self._weights, chaos, open_lease)
            undo.callback(self._forwards.unhook)
            self._forwards.hook(dict.fromkeys((model, model if generator is None else generator)), layers)
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
        """Pages that hold weights of this model."""
        return self._weights.pages

    @property
    def left(self) -> dict[str, str]:
        """Tensors that were left where they are -> why."""
        return dict(self._weights.left)

    @property
    def chaos(self) -> Chaos | None:
        """What moves pages at random, None where nothing does."""
        return self._forwards.chaos

    def release(self) -> None:
        """Gives the model back as it was: the same tensors, in torch's own memory, without hooks. Again: does nothing.

        All or nothing: raises ManageError while a forward of the model runs, torch.OutOfMemoryError where torch has
        no room for one more layer, DriverError; the model is then managed as before.
        """
        with _lock:
            model = self._model()
            if self.released or model is None:
                return
            if self._forwards.running():
                raise ManageError(f"a forward of {self._name} is running: release() it afterwards")
            self._weights.restore(model)
            self._detach()
            self._forwards.unhook()
            self._finalizer.detach()
            _managed.pop(model, None)

    def _collected(self) -> None:
        """The model is gone. Its ranges go with its tensors; what it was made of may live on, without hooks."""
        self._forwards.forget()
        self._forwards.unhook()
        self._detach()
        self._weights.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self.released:
            return f"<Managed {self._name}: {'collected' if self._model() is None else 'released'}>"
        weights = f"{self.pages} pages ({format_size(self.pages * self._weights.device.page_size)}) of weights"
        return f"<Managed {self._name}: {self._layers} decoder layers, {weights}>"


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


def _generator(model: nn.Module) -> nn.Module | None:
    """The part of `model`, as a rule all of it, that generates text the way transformers does."""
    transformers = sys.modules.get("transformers.generation.utils")
    if transformers is None:
        return None
    return next((module for module in model.modules() if isinstance(module, transformers.GenerationMixin)), None)


def _nothing() -> None:
    """What is to be undone of a cache that was not attached."""


def _attach_cache(generator: nn.Module) -> tuple[Callable[[], ForwardLease], Callable[[], object]]:
    """Makes the caches that it builds elastic. Returns what opens the lease of a forward of it, and what undoes all."""
    from . import generation  # imports transformers, which other modules can do without

    detach = generation.attach(generator)
    alive = weakref.ref(generator)

    def open_lease() -> ForwardLease:
        module = alive()
        return ForwardLease() if module is None else generation.forward_entered(module)

    return open_lease, detach
