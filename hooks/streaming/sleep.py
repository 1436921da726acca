"""The sleep of one model: its weights and caches leave the device until it is used again.

Note [Asleep]
    A sleeping model is one of which everything is on the host and nothing has a slot: its decoder layers as any that
    stream (arrangement.py), all other weights (embeddings, the head, small tensors) as one layer more, its caches as
    those that nobody uses. So each address shows its bytes, who writes to a weight writes to the one that comes back,
    and a forward that cannot wake the model, as another one runs it, is slow and right.

Note [Waking]
    What lies outside of layers comes back first, or with the next forward (rest.py, Note [Few rows]). Each layer that
    was resident gets a slot of its own, which is filled while the layers before
    it compute, as for layers that have come back from the host (ring.py, Note [Starting and stopping to stream]): the
    first token comes as late as the slower of its prefill and the link. The pages of the slots go to the layers' own
    addresses before the next forward, without a second copy where nobody can have written to the layer meanwhile.

Note [Level 2]
    What lies in the weights' file byte for byte is read from there again, and takes no memory: the bytes of a layer go
    to the host, are compared there, and host pages that have nothing else go back. Nothing is then at its addresses, so
    it must be reached through modules alone, which is counted (device/references.py); asking a module for a weight
    brings it to the host (backing.py, Note [File backings]). All else stays on the host: an adapter, a changed weight,
    what somebody refers to. So nothing is ever lost. The file stays unregistered meanwhile, as registering pins its
    pages.

Note [Has anybody looked?]
    Prefixes are worth nothing once a weight is written to, which torch does not always count. So they go at once where
    code gets a weight from a module while the model sleeps, or had one before. `model.device` and `model.dtype` get the
    first one, but read no byte: inputs are made for a model that sleeps as for any.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from ...allocator.errors import ManageError, PoolExhausted
from ...allocator.units import format_size
from ...offload.manager.client import PageClient
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.plan import Fewest, Plan
from ..device.references import Interpreter
from ..weights.ranges import Weights, host_pages_left
from .bound import Bound
from .model_residency import ModelResidency
from .rest import lying

if TYPE_CHECKING:
    from ...offload.residency.weights_file import FileSpan, TensorEntry

LEVELS: Final = (1, 2)
_FACTS: Final = ("device", "dtype")
_LIBRARIES: Final = ("transformers", "diffusers", "sentence_transformers")
_GRAPHS: Final = (
    "{0} cannot sleep: a CUDA graph that the program has captured reads its weights at their addresses. Drop the graph "
    "first, and capture it again after waking"
)
_NO_ROOM: Final = (
    "{0} cannot sleep: {1} would go to the host, and {2} are left there. Give a larger host budget "
    "(ballonet.install(host_budget=...), BALLONET_HOST_BUDGET){3}"
)
Places = Mapping[int, Iterable["tuple[TensorEntry, FileSpan]"]]  # id of a tensor -> where files may have it


class Sleep:
    """Puts one model to sleep and wakes it, while no forward of it runs. `level`: 0 while it is awake."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        residency: ModelResidency,
        manager: MemoryManager,
        caches: Callable[[], list[tuple[int, PageClient]]],
        interpreter: Interpreter,
        touched: Callable[[], object],
    ) -> None:
        """`caches`: of its batches, with the numbers that the manager gave them. `touched` is called, once in a sleep,
        where somebody may write to a weight: see Note [Has anybody looked?]."""
        self.level = 0
        self._name = type(model).__name__
        self._model = weakref.ref(model)
        self._weights = weights
        self._residency = residency
        self._manager = manager
        self._batches = caches
        self._interpreter = interpreter
        self._plan = Plan(())  # of the time before
        self._governed = False  # did the manager change the residency then?
        self._shown: Bound | None = None  # the dictionaries of their modules
        self._touched = touched
        self._looked = False  # was it called?
        residency.streaming.before_reveal = weights.backings.register_files

    def check(self) -> None:
        """Raises ManageError where the model cannot sleep: a graph of the program's has its addresses, or the host has
        too little room for level 1."""
        arrangement, weights = self._residency.arrangement, self._weights
        if arrangement.in_graphs:
            raise ManageError(_GRAPHS.format(self._name))
        page, left = weights.device.page_size, host_pages_left(weights.device)
        needed = weights.vacating.pages + sum(cache.device_pages for _, cache in self._caches)
        if needed > left:
            raise self._no_room(needed * page, left * page)

    def begin(self, level: int) -> None:
        """Falls asleep. ManageError where the host has too little room, or addresses cannot be exchanged now;
        DriverError, WeightsFileChanged: the model is awake then, as before."""
        residency, arrangement = self._residency, self._residency.arrangement
        with residency.captured.lock, residency.streaming.revealing:
            if level == 1:
                self.check()
            elif arrangement.in_graphs:
                raise ManageError(_GRAPHS.format(self._name))
            model, self._plan = self._model(), arrangement.plan
            assert model is not None  # the caller holds it
            places: dict[int, Any] = {}
            if level == LEVELS[-1]:
                from ..weights.files import possible_places  # imports transformers

                arrangement.plainly(lambda: places.update(possible_places(model)))
            self.level, self._looked = level, False
            try:
                self._manager.retreat(self._caches)
                self._governed = residency.stop()
                self._leave_layers(model, places)
                self._leave_rest(model, places)
                residency.streaming.on_asked = self._asked
            except BaseException as error:
                self.end()
                if isinstance(error, PoolExhausted):
                    left = host_pages_left(self._weights.device) * self._weights.device.page_size
                    raise self._no_room(self._weights.vacating.pages * self._weights.device.page_size, left) from error
                raise
            if level == LEVELS[-1]:
                self._weights.backings.unregister_files()
        self._weights.device.trim()

    def end(self, call: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Wakes up. `call`: the keywords of the forward for which it does: see Note [Waking]. PoolExhausted where the
        device has not even room for the least that the model needs, ManageError where addresses cannot be exchanged
        now, WeightsFileChanged, DriverError: it sleeps on then. Idempotent."""
        residency = self._residency
        with residency.captured.lock, residency.streaming.revealing:
            if not self.level:
                return
            self._weights.backings.register_files()
            residency.rest.make_room(self._plan.device_pages + residency.rest.missing)
            self._unbind()
            residency.rest.bring(call if self._governed else MappingProxyType({}))
            self._arrange()
            residency.resume()
            self.level = 0

    def show(self) -> None:
        """Leads all addresses to their bytes, as somebody is about to read them without waking the model. Raises as
        `Backing.reveal`."""
        if self.level:
            self._weights.backings.register_files()
            for layer in self._weights.on_host():
                self._residency.streaming.reveal(layer)
            self._residency.rest.reveal()

    def close(self) -> None:
        """Ends the sleep with the weights where they are, as the model is managed no more: see `show`."""
        self._unbind()
        self.level = 0

    def _unbind(self) -> None:
        """Gives modules plain dictionaries again, but for those of layers."""
        self._residency.streaming.on_asked = int
        if self._shown is not None:
            self._shown.release()
            self._shown = None

    @property
    def _caches(self) -> list[tuple[int, PageClient]]:
        return [*self._batches(), *self._manager.caches_of(self._residency)]

    # -- falling asleep

    def _leave_layers(self, model: nn.Module, places: Places) -> None:
        """Moves the layers off the device, as many at a time as the host has room for."""
        arrangement, weights, streaming = self._residency.arrangement, self._weights, self._residency.streaming
        left = [layer for layer in range(len(arrangement.pages)) if weights.parts(layer)]
        arrangement.leave(())
        while left:
            room = host_pages_left(weights.device)
            sums = accumulate(arrangement.pages[layer] for layer in left)
            fitting = max(1, sum(pages <= room for pages in sums)) if places else len(left)
            chosen, left = left[:fitting], left[fitting:]
            arrangement.leave(chosen)
            alone = {layer for layer in chosen if layer in streaming.bound and streaming.bound[layer].unheld()}
            if len(alone) < len(chosen):
                self._look()
            if places:
                arrangement.plainly(partial(self._hide, model, alone, places))

    def _leave_rest(self, model: nn.Module, places: Places) -> None:
        """Moves all other weights off the device."""
        self._residency.rest.leave()
        ids = {id(tensor) for tensors in lying(self._weights, model, (None,)).values() for tensor in tensors}
        shown = self._shown = Bound(model, ids, self._asked, self._interpreter)
        alone = shown.unheld() and all(bound.unheld() for bound in self._residency.streaming.bound.values())
        if not alone:
            self._look()
        elif places:
            self._hide(model, (None,), places)

    def _hide(self, model: nn.Module, layers: Iterable[int | None], places: Places) -> None:
        """Has the file serve for what it has of these layers, in the place of host pages."""
        from ..weights.files import compared  # imports transformers

        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for opened, tensors in lying(self._weights, model, layers).items():
                found = {id(tensor): compared(tensor, places.get(id(tensor), ()), memory) for tensor in tensors}
                there = {key: span for key, span in found.items() if not isinstance(span, str)}
                self._weights.backings.hide(opened, tensors, there)

    def _no_room(self, needed: int, left: int) -> ManageError:
        also = "" if self.level == LEVELS[-1] else ", or sleep at level 2, where files serve as far as they can"
        return ManageError(_NO_ROOM.format(self._name, format_size(needed), format_size(left), also))

    # -- while it sleeps

    def _asked(self) -> bool:
        """Called before code gets a weight from a module. Returns whether it reads no bytes: see Note [Has anybody
        looked?]."""
        if _asks_for_facts(sys._getframe()):
            return True
        self._look()
        self._residency.rest.reveal()
        return False

    def _look(self) -> None:
        """Notes that somebody has a weight, and may write to it."""
        if not self._looked:
            self._looked = True
            self._touched()

    def _arrange(self) -> None:
        """Has the layers stream that did before, or where there is less room as many as that demands."""
        residency, arrangement = self._residency, self._residency.arrangement
        plan = self._plan
        if plan.pages != tuple(arrangement.pages):  # layers have come or gone
            plan = Plan(tuple(arrangement.pages))
        device = self._weights.device
        if plan.device_pages > device.available:
            rule = Fewest(slots=self._weights.plans.slots)
            plan = rule.choose(plan.pages, device.available) or arrangement.plan
        try:
            arrangement.arrange(plan)
        except PoolExhausted:
            with suppress(PoolExhausted):  # the layers are read in place until the manager finds room
                arrangement.leave(())
        residency.settling = True


def _asks_for_facts(frame: FrameType | None) -> bool:
    """Is one of the callers of this frame a property of a library's models that tells where a weight is and of which
    type?"""
    while frame is not None:
        if frame.f_code.co_name in _FACTS and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
            return True
        frame = frame.f_back
    return False


def check_level(level: int) -> None:
    """Raises ManageError for a level that there is not."""
    if level not in LEVELS:
        raise ManageError(f"the level of sleep is {level!r}: give 1 (all to the host) or 2 (what files hold, to them)")
