"""Which layers of one model are resident and which stream, from one iteration to the next: the model's side of what the
governor decides (offload/governor/governor.py).

Note [Between iterations]
    An outermost forward that holds the only lease of its model asks what to stream, before it runs: then no kernel of
    the model is about to be launched. Where another thread runs the model too, or a change cannot be made now, all
    stays as it is and is asked again at the next.

Note [Nothing is prepared]
    A resident layer may be taken at any moment: its bytes go to the host then, by the core, which waits for everything
    that was submitted. So no host memory is used, and nothing is copied or watched, before pages have really run out.

Note [Copies that are kept]
    A layer that has left and come back is read from a slot of its own, and its parameters stay on the host (ring.py,
    Note [Leaving and coming back]): so its weights go there once. That lasts while pages have been short not long ago
    (`Governor.scarce`), and no longer than host pages are ample: such copies have no more of them than are free beside.
    Then, and before a forward with gradients or a capture, which read a layer's own addresses, it is resident again
    (`_settle`), and the next time that it leaves it is copied anew.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.errors import ManageError, PoolExhausted, SLOError, WeightsFileChanged
from ...offload.governor.decision import Decision
from ...offload.governor.governor import Governor
from ...offload.policy.ledger import Refusal
from ...offload.policy.plan import Plan, streaming
from ...offload.record.record import Phase, Point, Record
from ...offload.residency.ring import Streamed, spans
from ..device import governors, graphs
from ..device.pressure import Giver
from ..forward.turns import Turns
from ..measure.pace import Measured, Pace
from ..measure.report import Report
from ..options import ManageOptions
from ..weights import moving, room
from ..weights.layers import decoder_layers
from ..weights.ranges import Weights
from ..weights.storages import members
from .captured import Captured
from .streamed import Layer, Streaming


class Elastic(Captured):
    """The residency of one model's layers, as `governor` sees it (`seat.ModelClient`), from `follow` until `close`."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        turns: Turns,
        pace: Pace,
        governor: Governor,
        options: ManageOptions,
    ) -> None:
        super().__init__(model, weights, pace, governor)
        self.options = options
        self.record: Record | None = None
        self.decision: Decision | None = None
        self.last: dict[Phase, Measured] = {}  # by phase
        self.keeper: Callable[[], Giver | None] = lambda: None  # of what is kept for prompts that begin with it
        self.break_graphs: Callable[[int, bool], None] = lambda layer, here: None
        self._turns = turns
        self._tuning = governor.tuning.weights
        self._patience = 0
        self._unmeasured = 0  # iterations to which a link matters that nobody has measured
        self._lessons: deque[tuple[Point, float]] = deque()  # that the record does not have yet
        self._governed = self._was_governed = False
        self._streaming = Streaming(
            weights.ring,
            turns,
            weights.stream,
            weights.on_host,
            self._captured,
            pace.capturing,
            governor.tuning.waiting,
            governors.composed_with().interpreter,
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
    def alone(self) -> bool:
        """Does the forward that asks hold the only lease on the model, but for captures and its thread's sections?"""
        return self.group.leases - graphs.leases(self.group) - self._turns.leases <= 1

    @property
    def running(self) -> bool:
        return self._weights.group.leases > self._turns.leases

    def seconds(self, point: Point) -> float | None:
        return None if self.record is None else self.record.time(*point)

    def typical(self, point: Point) -> float | None:
        return None if self.record is None else self.record.typical(*point)

    def entry(self, layer: int) -> tuple[Any, list[Any]] | None:
        if layer in self._kept or self._turns.sections:
            return None
        parts: list[Any] = self._weights.ring.offer(layer) or [
            (part.home, first, count, part.backing.pages, first, [])
            for part in self._weights.parts(layer)
            for first, count in spans(part)
        ]
        return (self._weights.group, parts) if parts else None

    def give_up(self, pages: int) -> int:
        keeper = self.keeper()
        return 0 if keeper is None else keeper.give_up(self._weights.device, pages)

    # What the model does

    @property
    def streaming(self) -> Streaming:
        """The passes over its layers."""
        return self._streaming

    def follow(self, model: nn.Module, layers: Sequence[nn.Module], slots: int) -> None:
        """Takes over these layers, whose ranges hold what the model says: now and after each change of it.
        Nothing of it is taken meanwhile (`changing`). `slots`: those of what streams, if there are none yet.
        PoolExhausted, ManageError, DriverError: what streams is valid then."""
        self._streaming.close()
        order = [id(layer) for layer in layers]
        if order != self._order:
            self._weights.ring.release_layers()  # another layer has the number of one that streams
            self._order = order
        self._pages = self._weights.layer_pages(len(layers))
        self._arrange(streaming(self._pages, self._weights.away(), self._weights.ring.slots or max(slots, 1)))
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
        if (
            self._governed
            and self._governor.link.bandwidth is None
            and (self.plan.streamed or self._governor.pages.scarce)
        ):
            self._measure_link()
        self._pace.begin(point)

    def after(self) -> None:
        """Notes the end of a forward."""
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
            governor.link.bandwidth = self.record.bandwidth
        elif governor.link.bandwidth is None and self.plan.streamed:
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
        """Nothing of the model is taken meanwhile, and its modules have plain dictionaries. `act` follows it anew."""
        with self._lock:
            self._streaming.close()
            if self._governed:
                with self._governor.changing(self):
                    act()
            else:
                act()

    def report(self) -> Report:
        """What streams, why, and what it costs."""
        graphs.settle()
        self._learn_all()
        weights = self._weights
        why = "" if self.decision is None else self.decision.why
        return Report.of(
            self.name,
            self.plan,
            weights.device.page_size,
            bandwidth=self._governor.link.bandwidth,
            resident={phase: self.typical(found.point) for phase, found in self.last.items() if found.point},
            last=self.last,
            slos={"decode": self.tpot_slo, "prefill": self.ttft_slo},
            link_bytes=weights.ring.copied,
            file_bytes=weights.file_bytes,
            host_bytes=weights.host_pages * weights.device.page_size,
            kept=self.kept_layers,
            kv=self._governor.caches_of(self),
            lending=self._governor.exchange.lending_of(self),
            why=why,
        )

    def stop(self, *, collected: bool = False) -> None:
        """Nothing of it changes any more by itself; what streams goes on streaming. `collected`: by a finalizer."""
        self._was_governed, self._governed = self._governed, False
        if collected:
            self._governor.collected(self)
        else:
            self._governor.remove(self)

    def resume(self) -> None:
        """Lets layers come and go again, if they did before `stop`."""
        if self._was_governed:
            self._governor.add(self)
            self._governed = True

    def close(self) -> None:
        """Ends streaming: layers stay where they are, and are read there."""
        self.followed = False
        graphs.forget(self)
        for layer in self._weights.on_host():
            self.break_graphs(layer, False)
        self._streaming.close()

    def _ask(self, point: Point) -> None:
        decision = self.decision = self._governor.before(self, point)
        if decision.notice is not None:
            warnings.warn(decision.notice, RuntimeWarning, stacklevel=2)
        if self._patience:
            self._patience -= 1
        elif (decision.plan != self.plan or self._weights.ring.back) and self.alone and not self._turns.sections:
            try:
                with self._lock:
                    if decision.plan != self.plan:
                        self._change(decision.plan)
                    if ready := self._to_settle():
                        self._settle(ready)
            except WeightsFileChanged:
                raise
            except (PoolExhausted, ManageError):
                self._patience = self._tuning.again  # all is valid as it is

    def prepare_capture(self) -> None:
        with self._lock, suppress(PoolExhausted, ManageError):
            if self._weights.ring.back and not self.here and not self._turns.sections:
                self._settle(self._weights.ring.back)

    def _to_settle(self) -> tuple[int, ...]:
        """The layers whose copies on the host are to be given up now. See Note [Copies that are kept]."""
        ring = self._weights.ring
        if not ring.back or not self._governor.pages.scarce or torch.is_grad_enabled():
            return ring.back
        over = ring.host_pages - room.host_pages_left(self._weights.device)
        pages = accumulate((self._pages[layer] for layer in ring.back), initial=0)
        return tuple(layer for layer, before in zip(ring.back, pages, strict=False) if before < over)

    def _measure_link(self) -> None:
        """See governors.py, Note [The link of a model that runs]. Where it cannot be it is tried again later."""
        self._unmeasured += 1
        if self._unmeasured % self._tuning.again == 1:
            governors.measure_link(self._weights.device, self._governor, leave=self._governor.pages.mark)

    def _change(self, plan: Plan) -> None:
        if not self._kept.isdisjoint(plan.streamed):  # decided before they were captured
            return
        with self._governor.changing(self):
            self._streaming.close()
            self._arrange(plan)

    def _settle(self, layers: Iterable[int]) -> None:
        """Notes that these have come back, and are resident again."""
        with self._governor.changing(self) if self._governed else nullcontext():
            self._streaming.close()
            try:
                for layer in layers:
                    ring = self._weights.ring
                    copied = sum(part.count for part in ring.parts(layer) if part.backing.file is None)
                    ring.settle(layer)
                    self._governor.events.decided("host copies", "revert", copied, what=self.name)
            finally:
                self._bind()

    def _arrange(self, plan: Plan) -> None:
        """Streams what the plan says, as far as it can."""
        weights, ring = self._weights, self._weights.ring
        layers = [
            Streamed(layer, slot, weights.parts(layer)) for layer, slot in zip(plan.streamed, plan.slots, strict=True)
        ]
        same = (layer for layer in ring.back if weights.parts(layer) == ring.parts(layer))
        coming = sorted(set(weights.on_host()).difference(plan.streamed, same))
        try:
            ring.arrange(plan.slot_pages, layers, [Streamed(layer, 0, weights.parts(layer)) for layer in coming])
        finally:
            self._bind()

    def _bind(self) -> None:
        """The calls of its layers that are on the host read slots from now on."""
        ring = self._weights.ring
        self._plan_of(ring.streamed, tuple(map(ring.slot_of, ring.streamed)))
        model = self._model()
        modules = () if model is None else decoder_layers(model)
        found = {}
        for layer in (*ring.streamed, *ring.back):
            if layer < len(modules):
                lying = moving.tenants_of(self._weights.ranges.get(layer, ()), members(modules[layer], ()))
                tensors = frozenset(id(member.tensor) for member, _ in lying)
                found[layer] = Layer(modules[layer], tensors, ring.parts(layer))
        self._streaming.bind(found, self._weights.device.page_size)
        for layer in range(len(modules)):
            self.break_graphs(layer, layer in found)

    def _replanned(self) -> None:
        if self._governed:
            with suppress(_Later), self._governor.changing(self):
                raise _Later  # nothing is arranged now
            self._governor.changed(self)

    def _learn(self, measured: Measured) -> None:
        point = measured.point
        if point is None or measured.seconds <= 0:
            return
        self.last[point.phase] = measured
        self._lessons.append((point, measured.seconds))
        # Not each time: a lesson is a hundred calls, and after news all decisions are made anew.
        if len(self._lessons) < self._tuning.tell and self.record is not None and self.record.knows(point):
            return
        before = self.seconds(point)
        self._learn_all()
        now = self.seconds(point)
        news = before is None or now is None or abs(now - before) > before * self._tuning.news
        if self._governed and news:
            self._governor.changed(self)

    def _learn_all(self) -> None:
        """Adds what was measured since to the record."""
        record = self.record or Record({}, self._governor.link.bandwidth or 1.0)
        with suppress(IndexError):  # there are no more, or another thread has taken the last one
            while True:
                record = record.learned(*self._lessons.popleft())
        self.record = record


class _Later(Exception):
    """What was taken is arranged another time."""


def _refused(refusal: Refusal, device: Device, others: int) -> SLOError:
    """`others`: device pages that hold something else than the model's layers."""
    budget = None if refusal.pages is None else (others + refusal.pages) * device.page_size
    return SLOError(f"{refusal.model} cannot keep its SLO: {refusal.why}", refusal.slo, budget)
