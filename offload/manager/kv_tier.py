"""A KV cache in use: what happens to its pages before, while and after its layers append.

Note [Who calls]
    The thread that uses the cache calls KVTier; the manager KVClient (kv_client.py), on any thread, `offers` even
    under its lock, or in a finalizer, in the middle of anything. So KVClient never waits for the lock of the cache, and
    no holder of that lock calls the manager.

Note [Iterations like the last]
    An iteration of one token, after one for which all was on the device, and no page came, left, was saved or filled
    since, begins in one call (`continues`). What may change that are the manager's events (memory_manager.py, Note
    [Events]), what the core takes, and full pages that the manager was not told of. Two in a row of `sampled` begin as
    all others do, from which the time of an iteration is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, get_ident

from ...allocator._native import Device, Group, Transfer
from ..policy.kv_pages import AHEAD, ahead, mean_seconds, scarce, window, worth_telling
from ..policy.reclaim_order import PageSource
from ..residency.kv_extent import KVExtent, KVExtents
from .kv_client import KVClient, KVTurns
from .memory_manager import MemoryManager


class KVTier:
    """The pages of one cache in use. Refers to its ranges weakly."""

    def __init__(self, device: Device, group: Group, manager: MemoryManager, model_name: str = "") -> None:
        """`group`: of all its ranges; `model_name`: of its model, for readers."""
        self.lock = Lock()  # of the states of its pieces
        self.last_wait_succeeded = True  # did others give what they lease when they were waited for last?
        self.manager = manager
        self.turns = KVTurns()
        self.extents = KVExtents(device)
        self.transfer = Transfer(device)  # the stream of its copies
        self.client = KVClient(device, group, manager, self.extents, self.turns, self.transfer, self.lock)
        self._device = device
        self._way = self.client.way
        self._restoring = Lock()  # held while pages get their bytes
        self._arrives = False  # are pages being restored, as far as known?
        self._unreported = 0  # full pages that the manager was not told of
        self._reclaimed = 0  # pages that the core had taken when the last iteration was looked at
        self._slot_changes = 0  # the count of slot changes that the manager was told last
        self.client.model_name = model_name
        self.number = manager.add_client(self.client)
        self._state = manager.clients.numbered(self.number)

    def enter(self, extent: KVExtent, stream: int) -> None:
        """Prepares a range before its layer appends and is read, on `stream`. BallonetError, DriverError."""
        self.turns.stream = stream
        if extent.mover.lacks_bytes_or_copying:
            self._arrive(extent, stream)
        self._way.enter(extent, stream)

    def prefilling(self, pages: int) -> None:
        """Called before a layer gets so many pages at once, as those after it will. Where too few are free for the next
        ones, starts to copy as many pages of layers that have run to the host, so that they can be given up at once
        (eLLM §4.3.2). DriverError."""
        wanted = 2 * pages  # the layer that runs next, and one more while its copies go. Chosen
        if self._device.available < wanted:
            self.client.write_behind(wanted)
            self.manager.reclaim.publish_now()

    def show(self, extent: KVExtent, stream: int | None) -> None:
        """Has `stream`, with None the host, find the tokens of this range at its addresses, until a layer enters. On
        any thread. BallonetError, DriverError."""
        self._arrive(extent, stream)
        if extent.mover.in_slot:
            self._way.map_to_host(extent)

    def _arrive(self, extent: KVExtent, stream: int | None) -> None:
        if extent.mover.lacks_bytes:
            with self._restoring:
                extent.fetch(self.transfer, stream or 0)
        extent.mover.arrive(stream)

    def iteration(self, stream: int, rows: int = 1, more: int = 0, forward: int = 0) -> None:
        """Begins an iteration: restores pages and arranges slots before the first layer appends `rows` tokens on
        `stream`. `more`: pages that each range gets for them; `forward`: the number of its lease, 0 outside of one.
        DriverError."""
        client, way, turns = self.client, self._way, self.turns
        validity = None if self.manager.clients.idleness.scheduled else self.manager.version.validity
        reclaimed = self._device.reclaimed
        if turns.skipped:
            way.forget_iteration()
        if self.manager.taken_of(self.number):
            self.extents.look_anew()
        if client.saving.notice() or self._unreported:
            self._unreported = 0
            self.manager.client_changed(self.number)
        away = self.extents.away
        pages = self.manager.restorable_pages(self.number) if away else 0
        client.used, self.turns.stream, client.takable.prefills = self.manager.clock(), stream, rows > 1
        if pages:
            self.restore(pages, stream)
            away = self.extents.away
        client.goal = 0
        if more:
            client.goal = client.pages + more * client.grows_by
            self.manager.repayment.needs(self.number, more * client.grows_by)
        if away or way.kv_slots.slots:
            self._arrange(stream, rows, away)
        else:
            way.nothing_away(rows)
        if self._arrives:
            self._arrives = self.extents.lacks_bytes_or_copying
        turns.forward = 0 if away or way.kv_slots.slots or self._arrives else forward
        if way.kv_slots.changes != self._slot_changes:
            self._slot_changes = way.kv_slots.changes
            self.manager.client_changed(self.number)
        alike = turns.forward and rows == 1 and not (turns.skipped or more or client.saving.busy)
        turns.validity, self._reclaimed = validity if alike else None, reclaimed
        turns.left, turns.skipped = self.manager.tuning.weights.sampled - 2, False

    def continues(self, lease: int) -> bool:
        """Begins an iteration of one token like the last one, within the forward of this `lease`; in one call, as
        it runs for each token. False, and nothing was done, where `iteration` has to look."""
        turns, manager = self.turns, self.manager
        if (
            (validity := turns.validity) is None
            or not turns.left
            or turns.since + 1 < turns.layers
            or validity.version != manager.version.number
            or (now := manager.clock()) >= validity.until
            or self._device.reclaimed != self._reclaimed
            or (state := self._state) is None
        ):
            return False
        self.client.used = state.activity.at = now
        running = manager.clients.running
        if running.ahead and (thread := get_ident()) in running.on:
            running.read.setdefault(thread, set()).add(state)
        turns.left -= 1
        turns.forward, turns.stream, turns.skipped = lease, -1, True  # the core is told of the stream
        return True

    def grown(self, pages: int, soon: bool) -> None:
        """Notes that so many more pages are full. `soon`: where pages are scarce the manager is told before the next
        iteration, once they are worth a new list."""
        self._unreported += pages
        self.turns.validity = None
        total = self._device.budget // self._device.page_size
        if not soon or not worth_telling(self._unreported, total):
            return
        if self.manager.pages.scarce or scarce(self._device.available, total, self.manager.tuning.pages):
            self._unreported = 0
            self.manager.client_changed(self.number)

    def appended(self, number: int, *, took: bool, next_takes: bool) -> None:
        """Maps pages ahead after a token came to the range of this number; see `ahead`."""
        width = window(self._device.page_size, AHEAD)
        for layer in ahead(number, len(self.extents), width, took=took, next_takes=next_takes):
            if (extent := self.extents.get(layer)) is not None:
                extent.map_ahead()

    def restore(self, pages: int, stream: int) -> int:
        """Restores so many pages that are away, if there is room, range after range; returns how many. DriverError."""
        self.extents.look()
        began, reading = self.manager.clock(), self._reading(self.extents.away)
        extents = [extent for extent in self.extents.all() if extent.away]
        shown = [extent for extent in extents if not extent.alone()]  # the others have no tensors over them by now
        back = self.bring_back(extents, pages, shown, stream)
        if back:
            predicted = None if reading is None else back * reading
            self.decided(PageSource.RUNNING_KV.label, "restore", back, predicted, self.manager.clock() - began)
            self.manager.client_changed(self.number)
        return back

    def bring_back(
        self,
        extents: Sequence[KVExtent],
        pages: int,
        shown: Sequence[KVExtent],
        stream: int,
        chosen: Sequence[int] | None = None,
    ) -> int:
        """Gives so many pages of `extents` their bytes again, if there is room: of each those of `chosen`, if that is
        not None; returns how many. `shown`: extents under tensors, which may be read on any stream: the host waits for
        their copies. DriverError."""
        self.turns.forward, self._arrives = 0, True
        back = 0
        with self._restoring:
            try:
                for extent in extents:
                    if back < pages:
                        back += extent.own(pages - back, chosen)
                for extent in extents:
                    extent.fetch(self.transfer, stream)
                for extent in shown:
                    extent.mover.arrive(None)
            except BaseException:
                for extent in extents:
                    extent.mover.recall()
                    extent.mover.arrive(None)
                raise
        return back

    def decided(
        self, source: str, verb: str, pages: int, predicted: float | None = None, measured: float | None = None
    ) -> None:
        """Logs an event about the cache's pages, by this thread. Times are in seconds."""
        what = self.client.name
        self.manager.events.decided(source, verb, pages, what=what, predicted=predicted, measured=measured)

    def _arrange(self, stream: int, rows: int, away: int) -> None:
        """Arranges how pages that stay away are read. Logs an event where slots come or go."""
        seconds = self._reading(away)
        link = None if seconds is None else self._device.page_size / seconds
        began = self.manager.clock()
        chosen = self._way.arrange(self.extents.first(self.turns.order), rows, link, stream)
        if chosen is not None:
            now = self.client.streamed
            verb, pages = "reclaim" if now.slots else "restore", now.slots * now.slot_pages
            self.decided("layer stream", verb, pages, chosen.exposed, self.manager.clock() - began)

    def _reading(self, away: int) -> float | None:
        """Mean seconds to copy a page that is away, from where it lies; None where a link that it needs was not
        measured."""
        near = self.extents.near
        return mean_seconds(near, away - near, self.manager.link.peer_page_seconds, self.manager.link.page_seconds)
