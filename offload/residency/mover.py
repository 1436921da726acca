"""Moves the pieces of one range between the device and their backing. Copies into slots: slots.py. Peer to host:
backing.py.

    save      to the backing, which has the same bytes from then on: in the background (`Saving`), or at once (`evict`)
    evict     the addresses lead to the backing, and the pages of the device are free
    restore   pages of the device first (`own`), as that waits for everything that was submitted, and then the bytes
              (`fetch`). Who reads waits for the copies of its own range alone (`arrive`): a stream waits, the host does
              not, and the layers before it compute meanwhile (SwiftCache §3.3). Until then the addresses do not show
              the bytes: `needs_wait_or_remap`.

What was interrupted is undone by `Saving.saved` and `recall`, or done again by `fetch`: pieces.py, Note [Interrupts].

Note [What is known where]
    What a piece leads to the native core knows best: it takes pages at any moment, on any thread. Kept here is what it
    cannot know: which backings have the bytes. To the core a backing with a page has them, and one without gets them
    when its piece is taken. So as long as no backing has a page and other bytes than the device, an entry of the
    reclaim list is right, however old.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...allocator._native import Device, Done, Range, Transfer
from ...allocator.errors import PoolExhausted
from .backing import FAR, Backing, Spans
from .pieces import PieceEvent, Pieces, PieceState, PieceStates, runs_of
from .slots import Copies

if TYPE_CHECKING:
    from ...allocator._native import Place


Runs = list[tuple[int, int]]  # [first, end) each, ascending


class Saving:
    """The pieces of `range_` that are being copied, or are about to be. See mover.py for who may call what."""

    def __init__(self, range_: Range, backing: Backing, states: PieceStates) -> None:
        self._range = range_
        self._backing = backing
        self._states = states
        self._copies: dict[int, Done | None] = {}  # of pieces that are SAVING, None where only marked

    def __contains__(self, piece: int) -> bool:
        return piece in self._copies

    @property
    def busy(self) -> bool:
        """Is anything being copied to the backing or from the peer, or was that interrupted? See `saved`."""
        return bool(self._copies or self._backing.going)

    def under_way(self) -> list[int]:
        """The pieces whose copies have been submitted. They may be taken: the core waits for all streams first, those
        of copies too. On any thread."""
        copies = tuple(self._copies.items())
        return [piece for piece, done in copies if done is not None and piece in self._states[PieceState.SAVING]]

    def finish(self, piece: int) -> bool:
        """Waits for the copy of this piece, which is clean then. False where it is only marked. DriverError."""
        if (done := self._copies[piece]) is None:
            return False
        done.wait()
        self._states.move_run(PieceEvent.SAVED, piece, piece + 1)
        del self._copies[piece]
        return True

    def give_up(self, piece: int) -> None:
        """Undoes `mark`: the piece is not saved."""
        self._states.move_run(PieceEvent.DIRTY, piece, piece + 1)
        del self._copies[piece]

    def forget(self, piece: int) -> None:
        """Drops the piece: another call has brought it to its backing, or given that up."""
        del self._copies[piece]

    def mark(self, pieces: Iterable[int]) -> None:
        """Marks pieces as about to be saved, and not takable from now on. The caller holds the lock."""
        for piece in pieces:
            self._copies[piece] = None
            self._states.move_run(PieceEvent.SAVE, piece, piece + 1)

    def save(self, pieces: Iterable[int], end: int) -> tuple[list[int], Copies]:
        """Maps backing pages of pieces that are still marked, and lie before `end`, as many as there are. Returns the
        pieces that got one, and the copies to submit before `submitted` is called. The caller holds the lock."""
        ready: list[int] = []
        for piece in pieces:
            known = piece in self._copies and piece < end
            if not known or self._range.leads_to(piece) != "device" or self._backing.has(piece):
                continue
            try:
                self._backing.map(piece)
            except PoolExhausted:
                break
            ready.append(piece)
        return ready, self._backing.saves(ready)

    def submitted(self, pieces: Iterable[int], done: Done) -> None:
        """Notes that the copies of these pieces have been submitted. The caller holds the lock."""
        self._copies.update(dict.fromkeys(pieces, done))

    def saved(self) -> bool:
        """Notes which copies have passed, to backings and from the peer to the host, and undoes what was interrupted.
        Returns whether more pieces are clean. The caller holds the lock. DriverError."""
        self._backing.demoted()
        before, passed = len(self._copies), list[int]()
        for piece, done in tuple(self._copies.items()):
            if done is None:
                if self._range.leads_to(piece) != "alias":
                    self._backing.pages.retire(piece, 1)
                self._states.move_run(PieceEvent.DIRTY, piece, piece + 1)
                del self._copies[piece]
            elif done.passed():
                passed.append(piece)
        self._states.move(PieceEvent.SAVED, passed)  # first: they are offered once they are nowhere else
        for piece in passed:
            del self._copies[piece]
        return len(self._copies) != before

    def dirty(self, first: int, end: int, stream: int) -> Runs:
        """Marks pieces of [first, end) that the device has as dirty: what `stream` is given from now on may write
        there, and waits for the copies. The caller holds a lease, and the lock. Returns the pieces, whose backings keep
        their pages yet."""
        pieces = Pieces(self._states.within(first, end, PieceState.CLEAN))
        for piece in [piece for piece in self._copies if first <= piece < end]:
            done = self._copies.pop(piece)
            if done is not None:
                done.before(stream)
            pieces.add(piece)
        self._states.move_run(PieceEvent.DIRTY, first, end)
        return list(pieces.runs)

    def stay(self, first: int, end: int, stream: int) -> None:
        """Keeps pieces of [first, end) from going from the peer to the host, as `Backing.stay`. The caller holds the
        lock."""
        self._backing.stay([piece for piece in self._backing.leaving if first <= piece < end], stream)


class Mover:
    """Moves the pieces of `range_`. One thread at a time moves them; others may `look`, and use `saving` under the
    lock. Per-iteration work is O(runs); only actual moves are O(pieces)."""

    def __init__(self, device: Device, range_: Range, backing: Backing, lock: threading.Lock) -> None:
        """`lock`: held while pieces are saved in the background, or get dirty again."""
        self.range = range_
        self.backing = backing
        self.states = PieceStates()
        self._offloaded = self.states[PieceState.OFFLOADED]
        self._in_slot = self.states[PieceState.IN_SLOT]
        self._arriving = self.states[PieceState.ARRIVING]
        self._device = device
        self._page = device.page_size
        self._lock = lock
        self.saving = Saving(range_, backing, self.states)
        self._copies: Done | None = None

    @property
    def needs_wait_or_remap(self) -> bool:
        """Do addresses not show the bytes yet (copies to wait for), or only for a layer's turn (a slot)?"""
        return self._in_slot.count > 0 or self._arriving.count > 0 or self._copies is not None

    @property
    def lacks_bytes(self) -> bool:
        """Do pieces have device pages again whose bytes no copy brings yet? See `fetch`."""
        return self._arriving.count > 0

    @property
    def lacks_bytes_or_copying(self) -> bool:
        """Is that so, or are bytes being copied to device pages of its own?"""
        return self._copies is not None or self._arriving.count > 0

    @property
    def away(self) -> int:
        """Pieces that lead to their backing or to a slot, as far as known."""
        return self._offloaded.count + self._in_slot.count

    @property
    def in_slot(self) -> bool:
        """Do pieces lead to a slot?"""
        return self._in_slot.count > 0

    @property
    def led_away(self) -> tuple[object, object]:
        """The runs of the pieces of `away`; another value whenever they are others."""
        return self._offloaded.runs, self._in_slot.runs

    def look(self, first: int, end: int) -> None:
        """Finds out which pieces of [first, end) were taken. On any thread: pieces.py, Note [Readers]."""
        with self.states.changing:
            for at, count, backing in self.range.runs(first, end - first) if end > first else ():
                if backing == "alias":
                    self.states.move_run(PieceEvent.TAKEN, at, at + count)

    def look_for_host_pages(self, first: int, end: int) -> None:
        """Finds out which pieces of [first, end) got a page of the host or the peer instead of one of the device."""
        for at, count, backing in self.range.runs(first, end - first):
            if backing in FAR:
                self.states.move_run(PieceEvent.TAKEN, at, at + count)

    def takable(self, first: int, end: int) -> tuple[Runs, Runs]:
        """The pieces of [first, end) that have a page of the device and may be taken: those that are clean, or will be
        once all streams have passed, and those whose bytes only the device has. On any thread."""
        saving = self.saving.under_way()
        clean = Pieces(self.states.within(first, end, PieceState.CLEAN))
        clean.update(saving)
        others = Pieces(
            self.states.within(
                first, end, PieceState.SAVING, PieceState.OFFLOADED, PieceState.IN_SLOT, PieceState.ARRIVING
            )
        )
        others.difference_update(saving)
        ready: Runs = []
        dirty: Runs = []
        for run in others.gaps(first, end):
            ready += clean.within(*run)
            dirty += clean.gaps(*run)
        return ready, dirty

    # -- to the backing

    def evict(self, pieces: Iterable[int], transfer: Transfer, stream: int | None, *, whole: bool = False) -> int:
        """Leads pieces to their backings, which get their bytes if they lack them, once what `stream` was given has
        passed, with None what every stream was given. Returns how many: not those for which that cannot be now.
        `whole`: PoolExhausted, and none of them led, where there are pages for some only. The caller holds a lease.
        DriverError."""
        with self._lock:
            if whole:
                self.saving.saved()  # no other call does, and interrupted pieces would be passed over
            return self._evict(pieces, transfer, stream, whole)

    def _evict(self, pieces: Iterable[int], transfer: Transfer, stream: int | None, whole: bool) -> int:
        chosen: list[int] = []
        dirty: list[int] = []
        try:
            self._choose(pieces, chosen, dirty, whole)
            if dirty:
                self.arrive(stream)  # some may have been restored just now
                copies = self.backing.saves(dirty)
                transfer.copy(copies, after=stream, owner=self.range.owner, to="host").wait()
            return self._lead(chosen)
        finally:
            for piece in dirty:
                self.look(piece, piece + 1)  # it may be led there, and Ctrl-C came before that was noted
                if self.states.of(piece) is PieceState.SAVING:
                    self.backing.pages.retire(piece, 1)
                    self.states.move_run(PieceEvent.DIRTY, piece, piece + 1)
                self.saving.forget(piece)

    def lead(self, pieces: Sequence[int]) -> int:
        """Leads pieces to their backings, which have their bytes. Returns how many: not all where that cannot be now.
        The caller holds a lease. DriverError."""
        with self._lock:
            return self._lead(pieces)

    def _lead(self, pieces: Sequence[int]) -> int:
        led = 0  # `alias` waits for all that was submitted, copies that others began too
        for first, end in runs_of(pieces):
            if not self.backing.lead(first, end - first):
                break
            self.states.move_run(PieceEvent.TAKEN, first, end)
            led += end - first
        return led

    def _choose(self, pieces: Iterable[int], chosen: list[int], dirty: list[int], whole: bool) -> None:
        """Finds the pieces that can be evicted, and gives the `dirty` ones pages of the backing."""
        for piece in sorted(pieces):
            if self.range.leads_to(piece) != "device" or piece in self._arriving:
                continue
            if piece in self.saving and not self.saving.finish(piece):
                continue
            if piece not in self.states[PieceState.CLEAN] or not self.backing.has(piece):
                self.states.move_run(PieceEvent.DIRTY, piece, piece + 1)
                self.saving.mark((piece,))
                try:
                    self.backing.pages.retire(piece, 1)
                    self.backing.map(piece)
                except BaseException as error:
                    self.saving.give_up(piece)
                    if isinstance(error, PoolExhausted) and not whole:
                        break
                    raise
                dirty.append(piece)
            chosen.append(piece)

    # -- to a slot

    def bind(self, pieces: Sequence[int], to: Range, at: int) -> int:
        """Leads pieces, ascending and host-mapped, to the pages of `to`, from `at` on. Returns how many: not all where
        addresses cannot be exchanged now. DriverError."""
        self.states.move(PieceEvent.BIND, pieces)
        led = 0
        for first, end in runs_of(pieces):
            if not self.range.alias(first, to, at + led, end - first):
                break
            led += end - first
        self.states.move(PieceEvent.UNBIND, pieces[led:])
        return led

    def unbind(self, pieces: Iterable[int], end: int) -> bool:
        """Leads pieces before `end` that lead to a slot to their backings again. False where that cannot be now.
        DriverError."""
        for first, last in runs_of(piece for piece in pieces if piece < end):
            for at, count, kind in self.range.runs(first, last - first):
                if kind == "alias":
                    if not self.range.alias(at, self.backing.pages, at, count):
                        return False
                    self.states.move_run(PieceEvent.UNBIND, at, at + count)
        return True

    # -- to the device

    def own(self, limit: int, end: int, chosen: Iterable[int] | None = None) -> int:
        """Gives up to so many pieces before `end` that are away, of those of `chosen` if that is not None, pages of the
        device again, those on the host first, which cost more there, and of each the last ones; their bytes follow
        (`fetch`). Takes no pages of others. Returns how many. The caller holds a lease. DriverError."""
        self._device.reap()  # what was given back and has passed is free
        limit = min(limit, self._device.available)
        away = self.states.within(0, end, PieceState.OFFLOADED, PieceState.IN_SLOT)
        pieces = [piece for first, last in reversed(away) for piece in range(last - 1, first - 1, -1)]
        if chosen is not None:
            wanted = frozenset(chosen)
            pieces = [piece for piece in pieces if piece in wanted]
        if self._device.peer is not None:
            pieces.sort(key=lambda piece: self.range.place(piece) == "peer")
        back = 0
        for first, last in runs_of(pieces[: max(0, limit)]):
            for at, count, backing in self.range.runs(first, last - first):
                if backing in FAR:
                    back += sum(self.exchange(piece, "device") for piece in range(at, at + count))
                elif backing == "alias":
                    back += self._own(at, count)
        return back

    def exchange(self, piece: int, place: Place) -> bool:
        """Gives a piece that has a page of its own another one, with its bytes. False where that cannot be now. The
        caller holds a lease. DriverError."""
        with self._lock:  # or a copy of it could begin meanwhile
            far = self.range.leads_to(piece) in FAR
            if not far and place != "device":
                if piece in self.saving and not self.saving.finish(piece):
                    self.saving.give_up(piece)
                self.states.move_run(PieceEvent.DIRTY, piece, piece + 1)
                self.backing.release(piece, piece + 1)  # what is away may be written to, and is not marked as dirty
            moved = self.range.move(piece, place)
            if moved and far == (place == "device"):
                self.states.move_run(PieceEvent.MOVED if far else PieceEvent.TAKEN, piece, piece + 1)
            return moved

    def _own(self, first: int, count: int) -> int:
        self.states.move_run(PieceEvent.FETCH, first, first + count)
        try:
            owned = self.range.own(first, count)
        except PoolExhausted:
            owned = False
        if not owned:
            self.states.move_run(PieceEvent.RECALL, first, first + count)
        return count if owned else 0

    def fetch(self, transfer: Transfer, stream: int, full: int) -> None:
        """Starts the copies to pieces that have device pages again, once what `stream` was given so far has passed.
        Pieces before `full` keep their backings; the others may be written to at any time. The caller holds a lease.
        DriverError."""
        runs = self._lacking()
        if runs:
            copies = [
                copy
                for first, count in runs
                for copy in self.backing.copies(first, count, self.range.address + first * self._page)
            ]
            self._copies = transfer.copy(copies, after=stream, owner=self.range.owner, to="device")
            with self._lock:
                for first, count in runs:
                    self.states.move_run(PieceEvent.ARRIVED, first, min(first + count, full))
                    if first + count > full:
                        first, last = max(first, full), first + count
                        self.states.move_run(PieceEvent.MOVED, first, last)
                        self.backing.pages.retire(first, last - first)
        self._give_up()  # what is left was interrupted before it had pages

    def recall(self) -> None:
        """Leads pieces that have device pages again, but not their bytes, to their backings, if that can be now.
        DriverError."""
        for first, count in self._lacking():
            if not self.backing.lead(first, count):
                return
        self._give_up()

    def _give_up(self) -> None:
        """Notes that pieces that are still ARRIVING are where their addresses lead."""
        for first, end in self._arriving.runs:
            for at, count, backing in self.range.runs(first, end - first):
                self.states.move_run(PieceEvent.RECALL if backing == "alias" else PieceEvent.MOVED, at, at + count)

    def _lacking(self) -> Spans:
        """(first, count) of the pieces that have pages of their own again, whose bytes are with their backings, by
        neighbours whose backings lie in one place."""
        return [
            (there, pieces)
            for first, end in self._arriving.runs
            for at, count, backing in self.range.runs(first, end - first)
            if backing == "device"
            for there, pieces, place in self.backing.pages.runs(at, count)
            if place in FAR
        ]

    def arrive(self, stream: int | None) -> None:
        """Has `stream`, with None the host, wait for the bytes of what was restored. On any thread."""
        done = self._copies
        if done is not None:
            done.wait() if stream is None else done.before(stream)
            if done.passed() and self._copies is done:
                self._copies = None
