"""The governor of a device: asked before each iteration what a model streams in it, it knows all models of the device
and the link, and tells the native core what may be taken until somebody asks again (Select-N §4.5, Oneiros §5.5).

Note [Who asks when]
    A model asks `before` each outermost forward, on the thread that runs it, and arranges what it is told within
    `changing`. Nothing else changes what a model streams, but for the core, which takes layers from the published list
    when pages run out; the governor hears of that the next time anyone asks. While nothing has happened an answer is
    looked up: by phase and by powers of two of batch and length, as in the performance record.

Note [What is prepared]
    The list has whatever `entry` offers, always. Twins cost host memory, so they are prepared (`cover`) only once free
    pages have been below a quarter of the budget, or somebody has an SLO: a model alone in a large pool never pays.

Note [Locks]
    One lock, held while numbers are looked at, never while a model prepares anything or the core waits for a layer that
    is being taken. `Device.taken`, `publish`, `snapshot` and `demand` are called under it: they take locks of the core
    only, which never calls Python. Entries are made without it; a list made of them is published only if nobody has
    begun a newer one, nor `changing`, since.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from .decision import Decision, decide, grant, listed
from .ledger import Refusal, Settled
from .published import Pool, Published
from .record import Point
from .remap import Calm, observe
from .seat import LAYERS, Governed, Seat, rounded
from .sharing import admit
from .situation import Situation
from .traffic import Traffic, sent

DWELL: Final = 10.0  # seconds that pages are empty before weights take them back
PAUSE: Final = 1.0  # seconds after which a model that began no iteration is idle
SPARE: Final = 32  # of the budget, a part that weights never take back, so that the next tokens find room
SHORT: Final = 4  # of the budget, the part of free pages below which twins are prepared


class Governor:
    """Thread-safe. `bandwidth`: of the link, bytes per second, measured; needed before a model with an SLO is added.
    `received`: bytes per second that go over the link (link.received), None where nobody can say; it is asked in the
    background, while anything streams. `dwell`, `pause`: seconds, see DWELL and PAUSE."""

    def __init__(
        self,
        device: Pool,
        *,
        bandwidth: float | None = None,
        received: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        dwell: float = DWELL,
        pause: float = PAUSE,
    ) -> None:
        self._device = device
        self._bandwidth = bandwidth
        self._clock = clock
        self._dwell = dwell
        self._pause = pause
        self._lock = threading.Lock()
        self._seats: dict[int, Seat] = {}  # by id of the model, in the order in which they came
        self._gone: deque[int] = deque()  # ids of models that are collected and have a seat yet
        self._numbers = 0
        self._traffic = 0.0
        self._watcher = None if received is None else Traffic(received, lambda: sent(device), self.set_traffic, clock)
        # what is looked up while nothing happens
        self._answers: dict[tuple[int, Point], Decision] = {}
        self._settled: Settled | None = None
        self._resting: tuple[int, ...] = ()  # idle models, in the order in which they ran
        self._wanting = 0  # free pages when a model got fewer than it would take, in powers of two; 0: none did
        # pages
        self._calm: Calm | None = None
        self._waited = False  # were layers taken since it was last looked?
        self._scarce = False
        self._list = Published(device)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of the link."""
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, found: float) -> None:
        with self._lock:
            self._bandwidth = found
            self._moved(*self._seats.values())

    def set_traffic(self, rate: float) -> None:
        """Others take so many bytes per second of the link; told apart by sixteenths of it."""
        with self._lock:
            if self._bandwidth is None:
                return
            step = self._bandwidth / 16
            before, self._traffic = self._traffic, math.ceil(rate / step) * step
            if before != self._traffic:
                self._moved()

    def admit(self, model: Governed, available: int) -> Refusal | None:
        """Before a model with an SLO is added: None, or why it cannot be kept and what would do, beside all models that
        are there, should they all decode. `available`: device pages for its layers; `model.plan`: with every layer
        resident. What nobody measured is not judged. ValueError where no bandwidth is known."""
        if self._bandwidth is None:
            raise ValueError("an SLO needs the measured bandwidth of the link")
        with self._lock:
            return admit(self._situation(self._clock(), available), model, available)

    def add(self, model: Governed) -> None:
        """The model is there, arranged as its plan says. ValueError where it has an SLO and no bandwidth is known."""
        if self._bandwidth is None and (model.tpot_slo is not None or model.ttft_slo is not None):
            raise ValueError("an SLO needs the measured bandwidth of the link")
        with self._lock:
            self._numbers += 1
            name = model.name
            if any(seat.name == name for seat in self._seats.values()):
                name = f"{name} ({self._numbers})"
            self._seats[id(model)] = Seat(self._numbers, name, model, len(model.plan.streamed))
            self._moved()
        self._publish()
        self._watch()

    def remove(self, model: Governed) -> None:
        """It is not any more: nothing of it is or will be taken once this returns. Again: does nothing."""
        with self._lock:
            seat = self._seats.pop(id(model), None)
            if seat is None:
                return
            self._moved()
            self._list.void()
        self._device.withdraw(seat.keys())
        self._publish()
        self._watch()

    def collected(self, model: Governed) -> None:
        """As `remove`, for a finalizer, which may run in the middle of anything, even here: whoever holds the lock may
        be this thread. Then it is removed the next time anyone asks. Its ranges are closed meanwhile, and the core
        takes nothing of those."""
        if id(model) in self._seats:
            self._gone.append(id(model))
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()
            self._publish()
            self._watch()

    def before(self, model: Governed, point: Point) -> Decision:
        """Called by whoever has the turn of the model, before an iteration. What differs from `model.plan` is to be
        arranged within `changing`. KeyError."""
        point = rounded(point)
        with self._lock:
            seat = self._seats[id(model)]
            now = self._clock()
            self._hear()
            self._arrive(seat, point, now)
            free = self._look(now)
            decision = self._answers.get((seat.number, point))
            if decision is None:
                situation = self._situation(now, free)
                decision = decide(situation, seat, point)
                seat.waking &= point.phase != "decode" or decision.plan != seat.model.plan
                self._settled = situation.settled
                self._wanting = free.bit_length() + 1 if situation.short else self._wanting
                self._answers[seat.number, point] = replace(decision, notice=None)
            stale = self._list.stale
        if stale:
            self._publish()
            self._watch()
        return decision

    def after(self, model: Governed) -> None:
        """The iteration has ended, however."""
        seat = self._seats.get(id(model))
        if seat is not None:
            seat.used = self._clock()

    @contextmanager
    def changing(self, model: Governed) -> Iterator[frozenset[int]]:
        """Within it nothing of the model is taken, and it may change: its plan, its ranges. Yields the layers that were
        taken since its plan was arranged; where no exception leaves it, `model.plan` has them. KeyError."""
        with self._lock:
            seat = self._seats[id(model)]
            seat.held += 1
            self._list.void()
        try:
            self._device.withdraw(seat.keys())
            with self._lock:
                self._hear()
                taken = frozenset(seat.taken)
            yield taken
            with self._lock:
                seat.taken -= taken
                seat.waking &= seat.point is None or seat.point.phase != "decode"
        finally:
            with self._lock:
                seat.held -= 1
                seat.grant = None
                self._moved(seat)
                self._list.void()
        self._publish()
        self._watch()

    def changed(self, model: Governed) -> None:
        """What `seconds` or `entry` say is different now. Any thread may say so."""
        with self._lock:
            seat = self._seats.get(id(model))
            if seat is None:
                return
            self._moved(seat)
            self._list.void()
        self._publish()

    # -- what happened; the caller holds the lock

    def _moved(self, *changed: Seat) -> None:
        """What was answered, settled and listed may not hold any more, nor what is known of these."""
        for seat in changed:
            seat.costs.clear()
        self._answers.clear()
        self._settled = None
        self._list.stale = True

    def _bury(self) -> None:
        while self._gone:
            if self._seats.pop(self._gone.popleft(), None) is not None:
                self._moved()
                self._list.void()

    def _hear(self) -> None:
        """Of layers that the core took, and of models that are gone."""
        self._bury()
        for _, key, _ in self._device.taken():
            number, layer = divmod(key, LAYERS)
            for seat in self._seats.values():
                if seat.number == number:
                    seat.taken.add(layer)
                seat.grant = None
            self._waited = True
            self._moved()

    def _arrive(self, seat: Seat, point: Point, now: float) -> None:
        if now - seat.used >= self._pause:
            seat.waking = True
            self._moved()
        seat.used = now
        if seat.point != point:
            seat.point = seat.last[point.phase] = point
            self._moved()
        resting = tuple(
            each.number
            for each in sorted(self._seats.values(), key=lambda each: each.used)
            if each is not seat and not self._active(each, now)
        )
        if resting != self._resting:
            self._resting = resting
            self._moved()

    def _active(self, seat: Seat, now: float) -> bool:
        return now - seat.used < self._pause or seat.model.running

    def _look(self, now: float) -> int:
        """At the pages: how many are free, and are there any for weights to take back?"""
        total = self._device.budget // self._device.page_size
        used: int = sum(count for owner, count in self._device.snapshot()["pages"].items() if owner != "free")
        free = max(0, total - used)
        waiting = self._waited or self._device.demand > 0
        self._waited = False
        self._calm, spare = observe(self._calm, now, free, waiting, self._mark(), self._dwell)
        if spare and grant(self._situation(now, free), spare):
            self._moved()
        if not self._scarce and (free * SHORT < total or any(seat.has_slo for seat in self._seats.values())):
            self._scarce = self._list.stale = True
        if self._wanting and free.bit_length() + 1 != self._wanting:
            self._wanting = 0
            self._moved()
        return free

    def _mark(self) -> int:
        """Pages that weights never take back."""
        return max(1, self._device.budget // self._device.page_size // SPARE)

    def _situation(self, now: float, free: int) -> Situation:
        active = frozenset(seat.number for seat in self._seats.values() if self._active(seat, now))
        return Situation(
            tuple(self._seats.values()),
            active,
            free,
            self._mark(),
            self._list.pages,
            self._device.page_size,
            self._bandwidth,
            self._traffic,
            self._settled,
        )

    # -- what follows; the caller does not hold the lock

    def _publish(self) -> None:
        """The reclaim list, if it is another one now. See Note [Locks]."""
        with self._lock:
            self._hear()
            if not self._list.stale:
                return
            order = listed(self._situation(self._clock(), 0))
            covers = [(seat.model, self._to_cover(seat, order)) for seat in self._seats.values()]
            draft = self._list.draft(order)
        if draft is not None:
            draft.fill()
            with self._lock:
                self._list.publish(draft)
        for model, layers in covers:
            if layers:
                model.cover(layers)

    def _to_cover(self, seat: Seat, order: list[tuple[Seat, int]]) -> tuple[int, ...]:
        """Layers whose twins are to be prepared now, the first first. The caller holds the lock."""
        layers = tuple(layer for each, layer in order if each is seat)
        if not self._scarce or layers == seat.covered:
            return ()
        seat.covered = layers
        return layers

    def _watch(self) -> None:
        """Others' traffic matters while anything streams."""
        if self._watcher is not None:
            with self._lock:
                self._watcher.wanted(any(seat.model.plan.streamed or seat.taken for seat in self._seats.values()))
