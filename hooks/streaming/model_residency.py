"""What of one model is resident and which layers stream, from one iteration to the next: the model's side of what the
manager decides (offload/manager/memory_manager.py).

Note [Between iterations]
    An outermost forward that holds the only lease of its model asks the manager what to stream, before it runs: then
    no kernel of the model is about to be launched. Where another thread runs the model too, or a change cannot be made
    now, nothing changes and the next forward asks again.

Note [Nothing is prepared]
    A resident layer may be taken at any moment: the core then copies its bytes to the host, and waits for everything
    that was submitted. So no host memory is used, and nothing is copied or watched, before pages have really run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, Literal

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.errors import ManageError, PoolExhausted, SLOError, WeightsFileChanged
from ...allocator.notices import warn
from ...offload.manager.client import OUTSIDE_LAYERS
from ...offload.manager.decision import StreamDecision
from ...offload.manager.kv_read_plan import Streamed
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.coordinator import Refusal
from ...offload.policy.plan import Plan
from ...offload.record.record import Point, Record
from ..device import graphs, managers
from ..device.managers import Giver
from ..device.references import label
from ..forward.hook_base import local_layers_of
from ..forward.lease import Turns
from ..measure.pace import Pace
from ..measure.report import Report
from ..measure.timings import Timings
from ..options import ManageOptions
from ..weights.ranges import Weights
from .arrangement import Arrangement
from .captured import Captured
from .rest import Rest
from .steps_alike import StepsAlike
from .streamed import Streaming

_NONE: Final[Mapping[str, Any]] = {}


class ModelResidency:
    """The residency of one model's weights, decided by `manager` (`client.ModelClient`), from `follow` to `close`."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        turns: Turns,
        pace: Pace,
        manager: MemoryManager,
        options: ManageOptions,
    ) -> None:
        self.name = label(model)
        self.options = options
        self.interval: int | Literal["auto"] | None = options.interval
        self.tpot_slo, self.ttft_slo, self.priority = options.tpot_slo, options.ttft_slo, options.priority
        self.others_wait = False  # see ModelClient.others_wait
        self.waited, self.copied = 0.0, 0.0  # see ModelClient
        self.decision: StreamDecision | None = None
        self.wanted_until: Callable[[], float | None] = lambda: None  # see ModelClient.wanted_until
        self.keeper: Callable[[], Giver | None] = lambda: None  # the store of kept prefixes
        self.timings = Timings(lambda: manager.link.bandwidth)
        self.alike = StepsAlike(weights.device, manager, pace, self.timings)
        self.streaming = Streaming(
            weights.ring,
            turns,
            weights.stream,
            weights.on_host,
            lambda layer: self.captured.noticed(layer),
            pace.capturing,
            managers.composed_with(weights.device).interpreter,
            local_layers_of(model),
            manager.waits,
        )
        self.arrangement = Arrangement(model, weights, self.streaming)
        self.rest = Rest(model, weights, manager, lambda: self.captured.reads)
        self.outside = self.rest.pages  # see ModelClient.outside
        self.captured = Captured(
            model, weights, pace, manager, self.arrangement, self._prepare_capture, self._replanned
        )
        self._weights = weights
        self._pace = pace
        self._manager = manager
        self._turns = turns
        self._tuning = manager.tuning.weights
        self._patience = 0
        # Does the next iteration read layers that come back from their slots, which are filled while it runs, before
        # their pages go to the layers' own addresses? One with gradients reads those, so it does not wait.
        self.settling = False
        self._unmeasured = 0  # iterations to which the link matters while it is not measured
        self._governed = self._was_governed = False

    # What the manager asks

    @property
    def plan(self) -> Plan:
        return self.arrangement.plan

    @property
    def floor(self) -> int:
        """Device pages to keep, less those of captured layers, which `plan` does not count; see `ModelClient`."""
        return max(0, -(-self.options.floor // self._weights.device.page_size) - self.captured.kept_pages)

    @property
    def alone(self) -> bool:
        """Does the forward that asks hold the only lease on the model, but for captures and its thread's sections?"""
        group = self._weights.group
        return group.leases - graphs.leases(group) - self._turns.leases <= 1

    @property
    def running(self) -> bool:
        return self._weights.group.leases > self._turns.leases

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        layer = None if index == OUTSIDE_LAYERS else index
        stays = not self.rest.pages() if layer is None else layer in self.arrangement.in_graphs
        if stays or layer in self.arrangement.dropped or self._turns.sections:
            return None
        parts = self.arrangement.entry(layer)
        return (self._weights.group, parts) if parts else None

    def give_up(self, pages: int) -> int:
        keeper = self.keeper()
        return 0 if keeper is None else keeper.give_up(pages)

    # What the model does

    def follow(self, layers: Sequence[nn.Module], slots: int) -> None:
        """Arranges these layers, at first and after each change of the model (`change`). `slots`, errors: as
        `Arrangement.follow`."""
        self.arrangement.follow(layers, slots)
        self.captured.attend()

    def before(self, point: Point | None, cache: object = None, kwargs: Mapping[str, Any] = _NONE) -> None:
        """Begins an iteration, see Note [Between iterations]. `cache`, `kwargs`: of the forward. WeightsFileChanged,
        DriverError; ManageError where a capture runs and layers stream."""
        reclaimed = self.alike.look()
        self.captured.thread.open = True
        if graphs.GRAPHS.loosened:
            graphs.tell_of_dropped()
        if self._pace.capturing():
            self.streaming.check_capture()
            graphs.noticed(self.captured)
            self._pace.begin(None)
            return
        for measured in self._pace.drain():
            self.waited += measured.stall if self.plan.streamed else 0.0  # else nothing is waited for that is away
            self.copied += self.arrangement.plan.copied_pages * (self._manager.link.page_seconds or 0.0)
            if self.timings.note(measured, self.arrangement.plan) and self._governed:
                self._manager.changed(self)
        standing = self.alike.decision
        if standing is not None and (self.waited >= standing.rent or self.copied >= standing.toll) and self._governed:
            self._manager.changed(self)
        if self._governed and point is not None:
            decision = self._manager.before(self, point)
            if decision is not self.alike.decision:
                if self.rest.look() and not self.settling and not self._turns.sections and self.alone:
                    with self.captured.lock, self.streaming.revealing:
                        if self.rest.try_to_bring(kwargs):
                            decision = self._manager.before(self, point)  # by what is free now
                self._arrange(decision)
        if (
            self._governed
            and (self.arrangement.plan.streamed or self._manager.pages.scarce)
            and self._manager.link.bandwidth is None
        ):
            self._measure_link()
        self._pace.begin(point)
        if self._governed:
            self.alike.looked(self, point, cache, kwargs, reclaimed)

    def require(self, tpot: float | None, ttft: float | None, others: bool) -> None:
        """Notes the SLOs of the next iteration's requests, in seconds, beside the model's own, and whether `others`
        wait for its end. Does nothing where the link cannot be measured, or the interval is fixed."""
        if others != self.others_wait:
            self.others_wait = others
            self._manager.changed(self)
        asked = _strictest(self.options.tpot_slo, tpot), _strictest(self.options.ttft_slo, ttft)
        if asked == (self.tpot_slo, self.ttft_slo) or not self._governed or self.options.interval != "auto":
            return
        if self._manager.link.bandwidth is None:
            self._measure_link()
        if self._manager.link.bandwidth is not None:
            self.tpot_slo, self.ttft_slo = asked
            self._manager.changed(self)

    def after(self) -> None:
        """Notes the end of a forward."""
        self._weights.freed_at_end = self._weights.group.unpinned
        self.captured.thread.open = False
        looked_at, more = self.alike.ended()
        if looked_at:
            self._pace.end()
        if more and self._governed:
            self._manager.after(self)

    def start(self, measured: Callable[[], Record], always: bool = False) -> None:
        """Lets the manager change the residency. `measured` returns the measured times of iterations; it is called if
        there is an SLO, or `always`. SLOError where the SLO cannot be kept; ManageError where times or the link cannot
        be measured, which without an SLO is a warning, as they are assumed then."""
        manager, device = self._manager, self._weights.device
        try:
            record = measured() if self.options.slo or always else None
        except ManageError as why:
            if self.options.slo:
                raise
            record = None
            warn(f"what {self.name} can give while it is idle is assumed: {why}")
        if record is not None:
            self.timings.record = record
            manager.link.bandwidth = record.bandwidth
        elif manager.link.bandwidth is None and (self.plan.streamed or manager.clients.models):  # either may give
            managers.measure_link(device, manager)
            device.trim()  # the memory of the measurement
        if self.options.slo:
            pages = device.snapshot()["pages"]
            others = sum(pages.values()) - pages["free"] - self.plan.device_pages
            refusal = manager.admit(self, device.budget // device.page_size - others)
            if refusal is not None:
                raise _refused(refusal, device, others)
        manager.add(self)
        self._governed = True

    def change(self, act: Callable[[], None]) -> None:
        """Calls `act`, which calls `follow`, while no layer is taken and the modules have plain dictionaries."""
        with self.captured.lock:
            self.streaming.close()
            with self.changing():
                act()

    @contextmanager
    def changing(self) -> Iterator[Arrangement]:
        """Yields the arrangement, to be changed while no forward runs or begins; no other thread takes or arranges a
        layer meanwhile."""
        governed = self._manager.changing(self) if self._governed else nullcontext()
        with self.captured.lock, self.streaming.revealing, governed:
            yield self.arrangement

    def rearrange(self, plan: Plan) -> None:
        """Arranges the layers as the plan says, between two iterations. PoolExhausted; ManageError where that cannot be
        done now; WeightsFileChanged, DriverError."""
        with self.captured.lock:
            if self.arrangement.in_graphs.isdisjoint(plan.streamed):  # else a layer was captured after the decision
                with self.changing() as arrangement:
                    arrangement.arrange(plan)
                self.waited = self.copied = 0.0

    def report(self) -> Report:
        """Makes the report: which layers stream, why, and at which cost."""
        graphs.tell_of_dropped()
        self.timings.learn()
        weights, last = self._weights, dict(self.timings.last)  # a copy, as other threads add to it
        why = "" if self.decision is None else self.decision.why
        return Report.of(
            self.name,
            self.plan,
            weights.device.page_size,
            bandwidth=self._manager.link.bandwidth,
            resident={phase: self.timings.typical(timing.point) for phase, timing in last.items() if timing.point},
            last=last,
            slos={"decode": self.tpot_slo, "prefill": self.ttft_slo},
            link_bytes=weights.ring.copied,
            file_bytes=weights.backings.file_bytes,
            host_bytes=weights.backings.host_pages * weights.device.page_size,
            kept=tuple(sorted(self.arrangement.in_graphs)),
            kv=self.caches(),
            lending=self._manager.repayment.lending_of(self),
            why=why,
            entering=self.timings.entering,
        )

    def caches(self) -> tuple[Streamed, ...]:
        """How each KV cache of the model reads its pages that are on the host."""
        return tuple(cache.streamed for _, cache in self._manager.caches_of(self))

    def stop(self, *, collected: bool = False) -> bool:
        """Stops changes by the manager; layers that stream go on streaming. `collected`: called by a finalizer. Did
        the manager change the residency?"""
        self._was_governed, self._governed = self._governed, False
        if collected:
            self._manager.collected(self)
        else:
            self._manager.remove(self)
        return self._was_governed

    def resume(self) -> None:
        """Undoes `stop`: the manager changes the residency again, if it did before."""
        if self._was_governed and not self._governed:
            self._manager.add(self)
            self._governed = True

    def close(self) -> None:
        """Ends streaming: layers stay where they are, and are read there."""
        self.captured.forget()
        self.arrangement.close()

    def _arrange(self, decision: StreamDecision) -> None:
        """Carries out a decision, if that can be done now."""
        self.decision, self.alike.decision, plan = decision, None, self.arrangement.plan
        if decision.notice is not None:
            warn(decision.notice)
        settling, self.settling = self.settling and not torch.is_grad_enabled(), False
        if settling:
            return
        if self._patience:
            self._patience -= 1
        elif not self.arrangement.has_arranged(decision.plan) and self.alone and not self._turns.sections:
            try:
                with self.captured.lock:
                    if decision.plan != plan or self.arrangement.read_in_place:
                        self.rearrange(decision.plan)
                    if ready := self.arrangement.returned(self._manager.pages.scarce):
                        self._make_resident(ready)
            except WeightsFileChanged:
                raise
            except (PoolExhausted, ManageError):
                self._patience = self._tuning.again  # the arrangement is valid as it is
        if self.arrangement.has_arranged(decision.plan) and not self.rest.on_host:
            self.alike.decision = decision

    def _prepare_capture(self) -> None:
        with self.captured.lock, suppress(PoolExhausted, ManageError):
            back = self._weights.ring.own.back
            if not self.captured.runs_on_this_thread and not self._turns.sections:
                if back:
                    self._make_resident(sorted(back))
                if self._governed and not self.running and self.rest.away:
                    self.rest.try_to_bring({})

    def _measure_link(self) -> None:
        """Measures the link, now and then until it succeeds; see managers.py, Note [The link of a model that runs]."""
        self._unmeasured += 1
        if self._unmeasured % self._tuning.again == 1:
            managers.measure_link(self._weights.device, self._manager, leave=self._manager.pages.mark)

    def _make_resident(self, layers: Iterable[int]) -> None:
        """Makes layers resident that have come back, and logs that."""
        with self.changing() as arrangement:
            arrangement.make_resident(
                layers, lambda pages: self._manager.events.decided("host copies", "restore", pages, what=self.name)
            )

    def _replanned(self) -> None:
        if self._governed:
            with suppress(_Later), self._manager.changing(self):
                raise _Later
            self._manager.changed(self)


def _strictest(*slos: float | None) -> float | None:
    return min((slo for slo in slos if slo is not None), default=None)


class _Later(Exception):
    """Raised to withdraw published layers without arranging any."""


def _refused(refusal: Refusal, device: Device, others: int) -> SLOError:
    """`others`: device pages that hold something else than the model's layers."""
    budget = None if refusal.pages is None else (others + refusal.pages) * device.page_size
    return SLOError(f"{refusal.model} cannot keep its SLO: {refusal.why}", refusal.slo, budget)
