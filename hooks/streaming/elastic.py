"""Which layers of one model are at home and which stream, from one iteration to the next: the model's side of what the
governor decides (offload/govern/governor.py).

Note [Between iterations]
    An outermost forward that holds the only lease of its model asks what to stream, before it runs: then no kernel of
    the model is about to be launched, and its turn keeps others from beginning. Where another thread runs the model
    too, or a change cannot be made now, all stays as it is and is asked again at the next.

Note [Twins in the background]
    A layer at home can be taken at any moment once it has a twin and nobody can write it unseen. So it is watched
    first, then looked at for references from outside, then copied, on a thread of its own, and only then offered.
    Whoever looks at it ends that: its twin may be out of date from then on. After `OFTEN` times it is left alone.
    While it is copied its weights stay where they are, whatever becomes of the model: beside a forward the thread holds
    the layer's modules, else its tensors, and whoever looks at the layer, to replace some perhaps, waits for the lock.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from ...allocator._native import Device, Range
from ...allocator.display import progress
from ...allocator.errors import BallonetError, ManageError, PoolExhausted, SLOError, WeightsFileChanged
from ...allocator.interrupts import Guarded, guarded, if_free
from ...offload.decide.ledger import Refusal
from ...offload.decide.plan import Plan, streaming
from ...offload.govern.decision import Decision
from ...offload.govern.governor import Governor
from ...offload.govern.pages import SPARE
from ...offload.measured.record import Phase, Point, Record
from ...offload.move.ring import Streamed, spans
from .. import governors, graphs
from ..measure.marks import relaxed
from ..measure.pace import Measured, Pace
from ..measure.report import Report
from ..prefix.pressure import Giver
from ..weights import moving
from ..weights.layers import decoder_layers
from ..weights.ranges import Finder, Weights, is_away, nowhere
from ..weights.storages import Member, members
from .captured import Captured
from .streamed import Streaming
from .turns import Turns

Tenant = tuple[Member, Range]
OFTEN: Final = 4  # times that a layer is prepared anew after somebody looked at it
PATIENCE: Final = 16  # iterations until what could not be arranged or measured is tried again, or new times are told
BETWEEN: Final = 0.02  # seconds between looks whether a model that runs has cleared a layer


class Options(NamedTuple):
    """As for `manage()`; times in seconds, `floor` in bytes."""

    interval: int | Literal["auto"] | None = "auto"
    tpot_slo: float | None = None
    ttft_slo: float | None = None
    priority: int = 0
    floor: int = 0

    @property
    def slo(self) -> bool:
        """Is there any?"""
        return self.tpot_slo is not None or self.ttft_slo is not None


class Elastic(Captured):
    """Of one model, as `governor` sees it (`seat.Governed`), from `follow` until `close`."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        turns: Turns,
        pace: Pace,
        governor: Governor,
        find: Finder,
        options: Options,
    ) -> None:
        super().__init__(model, weights, pace, governor)
        self.options = options
        self.record: Record | None = None
        self.decision: Decision | None = None
        self.last: dict[Phase, Measured] = {}  # by phase
        self.keeper: Callable[[], Giver | None] = lambda: None  # of what is kept for prompts that begin with it
        self.break_graphs: Callable[[int, bool], None] = lambda layer, here: None
        self._turns = turns
        self._find = find
        self._storages = 0
        self._ready: set[int] = set()  # layers at home that may be taken
        self._seen: Counter[int] = Counter()  # how often somebody looked at a layer that was ready, or was to be
        self._wanted: tuple[int, ...] = ()
        self._worker: threading.Thread | None = None
        self._cleared: set[int] = set()  # layers that are watched, and that nobody referred to since
        self._copied: int | None = None  # the layer whose twin is being made
        self._patience = 0
        self._unmeasured = 0  # iterations to which a link matters that nobody has measured
        self._lessons = 0  # since the governor heard of what iterations take
        self._rearranging = False
        self.trouble = ""  # why twins are missing
        self._governed = self._was_governed = False
        self._streaming = Streaming(
            weights.ring,
            turns,
            self._strangers,
            weights.stream,
            self._seen_at_home,
            weights.away,
            self._captured,
            pace.capturing,
        )

    # What the governor asks

    @property
    def interval(self) -> int | Literal["auto"] | None:
        return self.options.interval

    @property
    def tpot_slo(self) -> float | None:
        return self.options.tpot_slo

    @property
    def ttft_slo(self) -> float | None:
        return self.options.ttft_slo

    @property
    def priority(self) -> int:
        return self.options.priority

    @property
    def floor(self) -> int:
        """See Governed.floor: of it, what is beyond layers that stay at home, which its plan does not count."""
        return max(0, -(-self.options.floor // self._weights.device.page_size) - self.kept_pages)

    @property
    def running(self) -> bool:
        return self._weights.group.leases > 0

    def seconds(self, point: Point) -> float | None:
        return None if self.record is None else self.record.time(*point)

    def typical(self, point: Point) -> float | None:
        return None if self.record is None else self.record.typical(*point)

    def entry(self, layer: int) -> tuple[Any, list[Any]] | None:
        if layer not in self._ready or layer in self._kept or self._turns.sections:
            return None
        return self._weights.group, [
            (part.home, first, count, part.twin.pages, first, part.twin.sources(first, count))
            for part in self._weights.parts(layer)
            for first, count in spans(part)
        ]

    def cover(self, layers: Sequence[int]) -> None:
        self._wanted = tuple(layers)
        if self._missing() and (self._worker is None or not self._worker.is_alive()):
            self._worker = threading.Thread(target=self._cover_wanted, name="ballonet-twins")
            self._worker.start()

    def give_up(self, pages: int) -> int:
        keeper = self.keeper()
        return 0 if keeper is None else keeper.give_up(self._weights.device, pages)

    # What the model does

    @property
    def streaming(self) -> Streaming:
        """Who looks at its layers."""
        return self._streaming

    @property
    def twins(self) -> tuple[int, int]:
        """How many layers at home have twins, and how many are to have one."""
        return len(self._ready), len(self._ready | set(self._missing()))

    def follow(self, model: nn.Module, layers: Sequence[nn.Module], slots: int) -> None:
        """Its layers are these, and what lies in its ranges is as the model says: now and after each change of it.
        Nothing of it is taken meanwhile (`changing`). `slots`: that what streams takes turns in, if there are none yet.
        PoolExhausted, ManageError, DriverError: what streams is valid then, at rest."""
        self._ready.clear()
        self._cleared.clear()
        self._wanted = tuple(layer for layer in self._wanted if layer < len(layers))
        order = [id(layer) for layer in layers]
        if order != self._order:
            self._weights.ring.forget()  # another layer has the number of one that streams
            self._order = order
        self._streaming.close()
        with self._streaming.unseen():
            tenants = moving.tenants_of(self._weights.all_ranges(), members(model, layers))
        self._storages = len({member.tensor.untyped_storage()._cdata for member, _ in tenants})
        del tenants
        away = self._weights.away()
        for layer in range(len(layers)):
            if layer not in away:
                self._weights.uncover(layer)  # which may have been written meanwhile
        self._pages = self._weights.layer_pages(len(layers))
        self._watch(model, away)
        self._arrange(streaming(self._pages, away, self._weights.ring.slots or max(slots, 1)))
        self._attend()

    def before(self, point: Point | None) -> None:
        """An iteration begins. See Note [Between iterations]. WeightsFileChanged, DriverError; ManageError where it is
        captured, and cannot be."""
        self._thread.open = True
        graphs.settle()
        if self._pace.capturing():
            graphs.noticed(self)
            self._pace.begin(None)
            return
        for measured in self._pace.drain():
            self._learn(measured)
        if self._governed and point is not None:
            self._ask(point)
        if self._governed and self._governor.bandwidth is None and (self.plan.streamed or self._governor.scarce):
            self._measure_link()
        self._pace.begin(point)

    def after(self) -> None:
        """It has ended."""
        self._thread.open = False
        self._pace.end()
        if self._governed:
            self._governor.after(self)

    def start(self, measured: Callable[[], Record]) -> None:
        """The governor may change it from now on. `measured` is called for what its iterations take, where it has an
        SLO. SLOError where that cannot be kept; ManageError where the link cannot be measured."""
        governor, device = self._governor, self._weights.device
        if self.options.slo:
            self.record = measured()
            governor.bandwidth = self.record.bandwidth
        elif governor.bandwidth is None and self.plan.streamed:
            governors.measure_link(device, governor)
            device.trim()  # what was measured with
        if self.options.slo:
            pages = device.snapshot()["pages"]
            others = sum(pages.values()) - pages["free"] - self.plan.device_pages
            refusal = governor.admit(self, device.budget // device.page_size - others)
            if refusal is not None:
                raise _refused(refusal, device, others)
        governor.add(self)
        self._governed = True

    def change(self, act: Callable[[], None]) -> None:
        """Nothing of the model is taken meanwhile, nor prepared, and this thread may look at it unseen."""
        with self._lock, self._streaming.unseen():
            if self._governed:
                with self._governor.changing(self):
                    act()
            else:
                act()

    def forget_twins(self) -> None:
        """Whatever lies in layers at home may be written from now on."""
        with self._lock:
            for layer in tuple(self._ready):
                self._seen_at_home(layer)

    def report(self) -> Report:
        """What streams, why, and what it costs."""
        graphs.settle()
        weights = self._weights
        why = "" if self.decision is None else self.decision.why
        return Report.of(
            self.name,
            self.plan,
            weights.device.page_size,
            bandwidth=self._governor.bandwidth,
            resident={phase: self.typical(found.point) for phase, found in self.last.items() if found.point},
            last=self.last,
            slos={"decode": self.tpot_slo, "prefill": self.ttft_slo},
            link_bytes=weights.ring.copied,
            file_bytes=weights.file_bytes,
            host_bytes=weights.host_pages * weights.device.page_size,
            kept=self.kept_layers,
            kv=self._governor.caches_of(self),
            lending=self._governor.lending_of(self),
            why="; ".join(filter(None, (why, self.trouble))),
        )

    def stop(self, *, collected: bool = False) -> None:
        """Nothing of it changes any more by itself; what streams goes on streaming. `collected`: by a finalizer."""
        self._was_governed, self._governed = self._governed, False
        self._wanted = ()
        if collected:
            self._governor.collected(self)
        else:
            with self._lock:  # a twin that is being made
                self._governor.remove(self)

    def resume(self) -> None:
        """Its layers come and go again, if they did before `stop`."""
        if self._was_governed:
            self._governor.add(self)
            self._governed = True

    def close(self) -> None:
        """Watches nothing any more. Its layers stay where they are."""
        self.followed = False
        graphs.forget(self)
        self._wanted = ()
        self._turns.passes = None
        self._streaming.close()
        self._ready.clear()

    def _ask(self, point: Point) -> None:
        decision = self.decision = self._governor.before(self, point)
        if decision.notice is not None:
            warnings.warn(decision.notice, RuntimeWarning, stacklevel=2)
        if self._missing() and self._weights.group.leases == 1 and if_free(self._lock, self._clear_missing):
            self.cover(self._wanted)  # a thread that was to do it may have ended
        if self._ready and not self.plan.streamed and not self._governor.prepares and self._weights.group.leases == 1:
            if_free(self._lock, self._forget_spare)
        if self._patience:
            self._patience -= 1
        elif decision.plan != self.plan and self._weights.group.leases == 1 and not self._turns.sections:
            try:
                with self._lock:
                    self._change(decision.plan)
            except WeightsFileChanged:
                raise
            except (PoolExhausted, ManageError):
                self._patience = PATIENCE  # all is valid as it is

    def _measure_link(self) -> None:
        """See governors.py, Note [The link of a model that runs]. Where it cannot be it is tried again later."""
        self._unmeasured += 1
        if self._unmeasured % PATIENCE == 1:
            device = self._weights.device
            governors.measure_link(device, self._governor, leave=device.budget // device.page_size // SPARE)

    def _change(self, plan: Plan) -> None:
        model = self._model()
        if model is None or not self._kept.isdisjoint(plan.streamed):  # decided before they were captured
            return
        with self._streaming.unseen(), self._governor.changing(self) as taken, self._rearranged():
            covered = self._weights.covered()
            for layer in taken:
                for part in covered[layer]:
                    part.twin.check()  # the core cannot tell whether a file was what it should be
            self._watch(model, set(plan.streamed) - self._streaming.watched)
            home = {*self._weights.away(), *self._weights.ring.streamed}.difference(plan.streamed)
            self._check_held(home & self._streaming.watched)
            for layer in sorted(set(plan.streamed) - covered.keys()):
                self._check_held((layer,))
                self._weights.cover(layer, self._tenants(model, layer), self._find)
            self._arrange(plan)

    def _rearranged(self) -> Guarded[None]:
        """Within it whoever looks waits: for the lock, or where the layer streams for the turn."""

        def say(now: bool) -> None:
            self._rearranging = self._streaming.leaving = now

        return guarded(lambda: say(True), lambda failed: say(False))

    def _check_held(self, layers: Iterable[int]) -> None:
        """ManageError where someone may be about to read one of these, which are to lead elsewhere."""
        for layer in sorted(layers):
            if self._streaming.others((layer,)):
                raise ManageError(f"layer {layer} of {self.name} is referred to from outside of the model")

    def _arrange(self, plan: Plan) -> None:
        """Streams what the plan says, as far as it can."""
        ring, covered = self._weights.ring, self._weights.covered()
        layers = [Streamed(layer, slot, covered[layer]) for layer, slot in zip(plan.streamed, plan.slots, strict=True)]
        aloft = [
            each.layer
            for each in layers
            if any(not part.twin.pages.backed and is_away(part.home) for part in each.parts)
        ]
        others = set(self._weights.away()).difference(plan.streamed, ring.streamed)
        resting = [Streamed(layer, 0, covered[layer]) for layer in sorted(others)]
        before = others.union(ring.streamed)
        self._turns.passes = self._streaming
        try:
            ring.arrange(plan.slot_pages, layers, self._weights.stream(), aloft, resting)
        finally:
            now = set(ring.streamed)
            self._ready -= now
            self._welcome(before - now)
            self._plan_of(ring.streamed, tuple(map(ring.slot_of, ring.streamed)))
            self._settle_turns()

    def _replanned(self) -> None:
        if self._governed:
            with suppress(_Later), self._governor.changing(self):
                raise _Later  # nothing is arranged now
            self._governor.changed(self)

    def _welcome(self, layers: Iterable[int]) -> None:
        """These came home. They have their twins and may go again, but where somebody refers to them."""
        for layer in layers:
            self._ready.add(layer)  # before the census: whoever looks from now on finds it here
            if layer not in self._streaming.watched or self._streaming.others((layer,)):
                self._weights.ring.settle(layer)
                self._give_up(layer)

    def _watch(self, model: nn.Module, layers: Iterable[int]) -> None:
        modules = decoder_layers(model)
        for layer in layers:
            tensors = {id(member.tensor) for member, _ in self._tenants(model, layer)}
            with self._streaming.unseen():
                self._streaming.watch(layer, modules[layer], tensors)
            self.break_graphs(layer, True)
        self._settle_turns()

    def _unwatch(self, layer: int) -> None:
        with self._streaming.unseen():
            self._streaming.unwatch(layer)
        self.break_graphs(layer, False)
        self._settle_turns()

    def _settle_turns(self) -> None:
        """Where somebody watches, passes are made one at a time."""
        self._turns.passes = self._streaming if self._streaming.watched else None

    def _missing(self) -> list[int]:
        """Layers that are to have twins and have none."""
        done = self._ready.union(self._weights.ring.streamed)
        done |= self._kept
        return [layer for layer in self._wanted if layer not in done and self._seen[layer] < OFTEN]

    def _cover_wanted(self) -> None:
        """On a thread of its own. See Note [Twins in the background]."""
        try:
            loaded = self._loaded()
            nbytes = sum(map(self._nbytes, self._missing()))
            with relaxed(self._weights.device), progress(f"Twins of {self.name}", nbytes) as made:
                while self._governed and not self._turns.sections and threading.main_thread().is_alive():
                    missing = self._missing()
                    if not missing or self._model() is None:
                        return
                    layer = next((each for each in missing if each in self._cleared), missing[0])
                    if not self.running or (loaded and layer in self._cleared):  # between two forwards
                        if not self._prepare(layer):
                            continue
                    elif layer in self._cleared:
                        held = self._modules_of(layer)
                        with self._lock:
                            self._copy_home(layer, (), nowhere)
                        del held
                    else:
                        threading.Event().wait(BETWEEN)  # its next forward clears the layer
                        continue
                    made(self._nbytes(layer))
                    self._governor.changed(self)
        except (BallonetError, PoolExhausted, torch.OutOfMemoryError) as error:
            self._wanted = ()
            self.trouble = str(error)  # the host has too little, or a file changed: what there is serves on

    def _loaded(self) -> bool:
        """Are there files that it was loaded from?"""
        model = self._model()
        if model is None or self._find is nowhere:
            return False
        from ..compat import checkpoint_folder

        return checkpoint_folder(model) is not None

    def _nbytes(self, layer: int) -> int:
        return self.plan.pages[layer] * self._weights.device.page_size

    def _clear_missing(self) -> None:
        if (model := self._model()) is not None:
            self._clear(model)

    def _clear(self, model: nn.Module) -> None:
        """While no forward uses them: which layers that are to have twins does nobody else refer to?"""
        with self._streaming.unseen():
            for layer in self._missing():
                if layer not in self._cleared:
                    if layer not in self._streaming.watched:
                        self._watch(model, (layer,))
                    self._cleared.add(layer)  # before the census: whoever looks from now on takes it out again
                    if self._streaming.others((layer,)):
                        self._give_up(layer)

    def _prepare(self, layer: int) -> bool:
        """While no forward runs. False where that has to wait: someone else has the lock (whoever has the turn does not
        wait for it, as who has it may wait for the turn, in a finalizer), or the model has other layers by now."""
        done = True

        def prepare() -> None:
            nonlocal done
            if self._governed and (model := self._model()) is not None:
                done = self._follows(decoder_layers(model))
                if done:
                    with self._streaming.unseen():
                        self._clear(model)
                        self._copy_home(layer, self._tenants(model, layer), self._find)

        with self._turns.at_rest(or_flying=True):
            free = if_free(self._lock, prepare)
        if not (free and done):
            threading.Event().wait(BETWEEN)
        return free and done

    def _forget_spare(self) -> None:
        """Pages have been ample for long: its layers at home have no twins any more, and nobody watches them."""
        with suppress(_Later), self._streaming.unseen(), self._governor.changing(self) as taken:
            if taken:
                raise _Later  # they are arranged before the next iteration
            self._wanted = ()
            self._cleared.clear()
            spare = self._streaming.watched - self._kept
            self._ready -= spare
            for layer in sorted(spare):
                self._weights.uncover(layer)
                self._unwatch(layer)

    def _copy_home(self, layer: int, tenants: Sequence[Tenant], find: Finder) -> None:
        """Makes the twins of a layer if it is still cleared. Refers to no tensor but `tenants`, so that a forward may
        run where there are none."""
        self._copied = layer  # before the look: whoever comes from now on waits for the lock
        try:
            if layer in self._cleared and layer in self._missing() and self._governed:
                try:
                    self._weights.cover(layer, tenants, find)
                except BaseException:
                    self._give_up(layer)
                    raise
                self._ready.add(layer)  # before the look, too
                if layer not in self._cleared:
                    self._expose(layer)
        finally:
            self._copied = None

    def _give_up(self, layer: int) -> None:
        """For now: it is looked at, or was."""
        self._cleared.discard(layer)
        self._ready.discard(layer)
        self._seen[layer] += 1
        self._weights.uncover(layer)
        self._unwatch(layer)

    def _seen_at_home(self, layer: int) -> None:
        """Somebody looks at a watched layer that does not stream, and may write it from now on."""
        self._cleared.discard(layer)
        if layer in self._ready or layer == self._copied or self._rearranging:
            with self._lock:
                if layer in self._ready and self._governed:
                    self._expose(layer)

    def _expose(self, layer: int) -> None:
        """A layer at home that is ready may be written from now on. WeightsFileChanged where it was taken, and a file
        is not what it should be."""
        with suppress(_Later), self._governor.changing(self) as taken:
            if layer in taken:  # it is at rest, and what is written there stays
                for part in self._weights.parts(layer):
                    part.twin.check()
                    part.twin.shown = True
            else:
                self._weights.uncover(layer)
                self._seen[layer] += 1
                self._ready.discard(layer)
            if taken:
                raise _Later  # they are arranged before the next iteration

    def _tenants(self, model: nn.Module, layer: int) -> list[Tenant]:
        """What lies in the ranges of a layer, which is the layer's alone."""
        with self._streaming.unseen():
            found = members(decoder_layers(model)[layer], ())
            return moving.tenants_of(self._weights.ranges.get(layer, ()), found)

    def _modules_of(self, layer: int) -> list[nn.Module]:
        """What holds the weights of a layer. Takes it for cleared no more where another one has its number by now."""
        model = self._model()
        layers = () if model is None else decoder_layers(model)
        if not self._follows(layers):
            self._cleared.discard(layer)
            return []
        return list(layers[layer].modules())

    def _follows(self, layers: Sequence[nn.Module]) -> bool:
        """Are these the layers of the last `follow`?"""
        return list(map(id, layers)) == self._order

    def _strangers(self) -> bool:
        return self._weights.storages != self._storages

    def _learn(self, measured: Measured) -> None:
        point = measured.point
        if point is None or measured.seconds <= 0:
            return
        self.last[point.phase] = measured
        before = self.seconds(point)
        record = self.record or Record({}, self._governor.bandwidth or 1.0)
        self.record = record.learned(point, measured.seconds)
        now = self.seconds(point)
        self._lessons += 1
        news = before is None or now is None or (abs(now - before) > before / 16 and self._lessons >= PATIENCE)
        if self._governed and news:  # not each time: all decisions are made anew then
            self._lessons = 0
            self._governor.changed(self)


class _Later(Exception):
    """What was taken is arranged another time."""


def _refused(refusal: Refusal, device: Device, others: int) -> SLOError:
    """`others`: device pages that hold something else than the model's layers."""
    budget = None if refusal.pages is None else (others + refusal.pages) * device.page_size
    return SLOError(f"{refusal.model} cannot keep its SLO: {refusal.why}", refusal.slo, budget)
