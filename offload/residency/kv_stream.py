"""The layer-stream cache: one or two buffers, each of one layer's size, through which a KV cache whose pages lie on the
host is read layer by layer (SwiftCache §3.2, §3.3).

Words
    at rest  what is away leads to its twin: valid for everything, slow to read
    flying   it leads to a buffer, which holds its bytes from `enter` until the next layer enters

Note [Whose a buffer is]
    is written down buffer by buffer (`holds`), and not derived from an index: an iteration may end anywhere, by an
    exception or because layers are left out, and the next one finds what is really there. While a copy is submitted a
    buffer is nobody's. What fills it for layer j is submitted when the next layer enters, once nobody has a tensor over
    the layer that had it before: so all that read it has been launched, and the copy waits for that by an event. Where
    somebody still has one, that layer comes to rest first.

Note [Its own tail]
    What flies are full pages that are away. The others are the layer's own: tokens are appended there, and read there.
    A page leaves for the host once it is full, as those of any cache (kv_twin.py), and flies from a later take-off on.

Note [Taken]
    Who needs pages in the middle of an operator takes those of buffers too, as each layer's twin has its bytes: the
    core leads all addresses that lead to a page to their twins, at once (mapper_take.cpp, Note [Buffers]). So a buffer
    may have lost pages whenever a layer enters, and that is looked for before anything is copied. What led there is at
    rest from then on, and is read in place. Nobody else takes any while the thread that uses the cache leases it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from .kv_twin import Copies, KVTwin

if TYPE_CHECKING:
    from ...allocator._native import Part

_TAKEN: Final = -1  # in the place of a piece


class Slice(NamedTuple):
    """Pages of the buffer number `buffer` that may be taken together. `readers`: layers that read them."""

    buffer: int
    first: int
    pieces: int
    readers: int


class _Buffer:
    def __init__(self, opened: Range) -> None:
        self.range = opened
        self.pages = opened.pieces  # from its start on, that it has
        self.backed = opened.pieces  # pages that it has
        self.holds: _Flight | None = None
        self.done: Done | None = None
        self.stream: int | None = None  # that reads it


@dataclass(eq=False, slots=True)
class _Flight:
    """A layer that flies. `pieces`: in the order in which they lie in the buffer, `_TAKEN` where it has no page."""

    twin: weakref.ref[KVTwin]
    buffer: _Buffer
    _pieces: list[int] = field(default_factory=list)
    copies: Copies | None = None  # what fills the buffer; None where that is to be worked out
    away: object = None  # what `KVTwin.led_away` was when that was done
    seen: object = None  # and when it was looked last who leads elsewhere
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # (place in the buffer, first, count)
    led: int = 0  # pieces that lead to it

    @property
    def pieces(self) -> list[int]:
        return self._pieces

    @pieces.setter
    def pieces(self, now: list[int]) -> None:
        self._pieces, self.copies, self.away, self.seen = now, None, None, None
        self.runs = list(_neighbours(now))
        self.led = sum([count for _, _, count in self.runs])

    @property
    def there(self) -> list[int]:
        """The pieces that lead to it."""
        return [piece for piece in self.pieces if piece != _TAKEN]


class KVStream:
    """The buffers of one cache, at first none. Not thread-safe."""

    def __init__(self, device: Device, group: Group, transfer: Transfer) -> None:
        """`group`: of all ranges of the cache; `transfer`: the stream of its copies."""
        self.copied = 0  # bytes that came to buffers so far
        self.changes = 0  # how often other pieces came to lead to buffers, or fewer
        self._device = device
        self._group = group
        self._transfer = transfer
        self._page = device.page_size
        self._buffers: list[_Buffer] = []
        self._flights: list[_Flight] = []  # in the order in which they compute
        self._last: _Flight | None = None  # that entered last

    @property
    def pages(self) -> int:
        """Pages of each buffer; 0 where there is none."""
        return min((each.pages for each in self._buffers), default=0)

    @property
    def buffers(self) -> int:
        """How many there are."""
        return len(self._buffers)

    @property
    def pieces(self) -> int:
        """The pieces that are in a buffer."""
        return sum([each.led for each in self._flights])

    def open(self, count: int, pages: int) -> int:
        """Buffers of so many pages each, as many as there are pages for, in the place of those that there are; how
        many. Raises as `close`."""
        self.close()
        while len(self._buffers) < count:
            opened = self._device.reserve(pages * self._page, "kv", self._group, reuse=False)
            try:
                opened.map(0, pages)
            except PoolExhausted:
                break
            self._buffers.append(_Buffer(opened))
        self.changes += 1
        return len(self._buffers)

    def take_off(self, twins: Sequence[KVTwin]) -> None:
        """What is away of these layers flies, as far as their buffer has room, nobody holds a tensor over it, and
        addresses can be exchanged now. `twins`: in the order in which they compute. DriverError."""
        self._see()  # `open` may have taken pages of the first buffer for the second
        flights = [self._flight_of(twin) or self._flight(twin, n) for n, twin in enumerate(twins)]
        self._flights = [*flights, *(each for each in self._flights if each not in flights)]
        for twin, flight in zip(twins, flights, strict=True):
            self._lead(flight, twin)

    def enter(self, twin: KVTwin, stream: int) -> None:
        """The layer is about to append and to be read, on `stream`. BallonetError, DriverError."""
        self._see()
        last, self._last = self._last, self._flight_of(twin)
        if last is not None and last is not self._last:
            self._next(last)
        flight = self._last
        if flight is not None and flight.pieces:
            self._load(flight, stream)
            flight.buffer.stream = stream
            if flight.buffer.done is not None:
                flight.buffer.done.before(stream)

    def ground(self, twin: KVTwin) -> None:
        """The layer is at rest. BallonetError where that cannot be now, as another thread uses the cache or a graph is
        being captured; DriverError."""
        flight = self._flight_of(twin)
        if flight is not None:
            if flight.buffer.holds is flight:
                flight.buffer.holds = None
            if not twin.back(flight.there):
                raise BallonetError(_IN_USE)
            self.changes += bool(flight.pieces)
            flight.pieces = []
        twin.flying = False

    def look(self) -> None:
        """Finds out what does not lead to its buffer any more, under a lease: the core took pages, or some are home."""
        self._see()
        for flight in self._flights:
            twin = flight.twin()
            if twin is not None and flight.pieces and flight.seen is not twin.led_away:
                flight.seen = twin.led_away
                away = {at + n for at, _, count in twin.runs(flight.pieces) for n in range(count)}
                self._gone(flight, [place for place in range(len(flight.pieces)) if place not in away])

    def _see(self) -> None:
        """What the core took. See Note [Taken]."""
        for buffer in self._buffers:
            if buffer.range.backed != buffer.backed:
                lost = [place for place in range(buffer.range.pieces) if buffer.range.backing(place) != "device"]
                buffer.backed, buffer.pages = buffer.range.pieces - len(lost), lost[0]
                self.changes += 1
                for flight in self._flights:
                    if flight.buffer is buffer:
                        self._gone(flight, [place for place in lost if place < len(flight.pieces)])

    def _gone(self, flight: _Flight, places: Sequence[int]) -> None:
        gone = frozenset(places)
        pieces = [_TAKEN if place in gone else piece for place, piece in enumerate(flight.pieces)]
        while pieces and pieces[-1] == _TAKEN:
            pieces.pop()
        if pieces == flight.pieces:
            return
        flight.pieces = pieces
        self.changes += 1
        if not pieces and flight.buffer.holds is flight:
            flight.buffer.holds = None
        if (twin := flight.twin()) is not None:
            twin.flying = bool(pieces)

    # -- for who takes them, on any thread: what is not so any more the core finds out

    def slices(self) -> list[Slice]:
        """Returns slices of all buffers, from their ends on, where fewest layers have anything, and more each time."""
        found = []
        for number, buffer in enumerate(tuple(self._buffers)):
            used = [len(each.pieces) for each in tuple(self._flights) if each.buffer is buffer]
            end, count = buffer.pages, 1
            while end:
                first = max(0, end - count)
                found.append(Slice(number, first, end - first, sum(length > first for length in used)))
                end, count = first, 2 * count
        return sorted(found, key=lambda each: (each.readers, each.pieces))

    def parts(self, taken: Slice) -> list[Part]:
        """For `Device.publish`."""
        buffer = dict(enumerate(self._buffers)).get(taken.buffer)
        if buffer is None:
            return []
        found: list[Part] = [(buffer.range, taken.first, taken.pieces, None, 0, [])]
        for flight in tuple(self._flights):
            twin = flight.twin()
            if flight.buffer is buffer and twin is not None:
                for at, first, count in flight.runs:
                    low, high = max(at, taken.first), min(at + count, taken.first + taken.pieces)
                    for here, pieces, backing in twin.home.runs(first + low - at, high - low) if low < high else ():
                        if backing == "alias":
                            found.append((twin.home, here, pieces, twin.pages, here, []))
        return found

    def close(self) -> None:
        """Every layer is at rest, and the buffers are given back. Raises as `ground`."""
        for each in self._flights:
            if (twin := each.twin()) is not None:
                self.ground(twin)
        self._flights = []
        self._last = None
        while self._buffers:
            self.changes += 1
            self._buffers.pop().range.close()

    def _flight_of(self, twin: KVTwin) -> _Flight | None:
        return next((each for each in self._flights if each.twin() is twin), None)

    def _flight(self, twin: KVTwin, index: int) -> _Flight:
        """Neighbours use different buffers."""
        return _Flight(weakref.ref(twin), self._buffers[index % len(self._buffers)])

    def _lead(self, flight: _Flight, twin: KVTwin) -> None:
        """What is away and does not fly leads to the buffer from now on."""
        at = len(flight.pieces)
        room = max(0, flight.buffer.pages - at)
        there = {*flight.pieces}
        new = [piece for piece in twin.resting() if piece not in there][:room] if room else []
        if not new or not twin.alone():
            return
        if flight.buffer.holds is flight:
            flight.buffer.holds = None
        twin.flying = True
        self.changes += 1
        flight.pieces = [*flight.pieces, *new]  # before they are led there: what rests may be here, what flies must
        flight.pieces = flight.pieces[: at + twin.lead(new, flight.buffer.range, at)]
        twin.flying = bool(flight.pieces)

    def _next(self, last: _Flight) -> None:
        """All that reads the layer has been launched: its buffer is the next one's."""
        buffer = last.buffer
        if buffer.holds is last and buffer.stream is not None:
            turns = [each for each in self._flights if each.buffer is buffer and each.pieces]
            following = turns[(turns.index(last) + 1) % len(turns)]
            if following is last:
                self._vacate(buffer)
            else:
                self._load(following, buffer.stream)

    def _vacate(self, buffer: _Buffer) -> None:
        """Nobody has a tensor over what the buffer holds."""
        twin = None if buffer.holds is None else buffer.holds.twin()
        if twin is not None and not twin.alone():
            self.ground(twin)

    def _load(self, flight: _Flight, stream: int) -> None:
        """Has the buffer of the layer hold it, once what `stream` was given so far has passed."""
        buffer, twin = flight.buffer, flight.twin()
        if buffer.holds is flight or twin is None:
            return
        self._vacate(buffer)
        buffer.holds = None
        if buffer.stream is not None and buffer.stream != stream:
            self._copy([], buffer.stream)  # what comes next waits for that one too
        buffer.done = self._copy(self._copies(flight, twin), stream)
        buffer.stream = stream
        buffer.holds = flight

    def _copies(self, flight: _Flight, twin: KVTwin) -> Copies:
        """What fills the buffer of the layer. The same in each iteration, while it flies as it does; with a peer twins
        may move."""
        if flight.copies is None or flight.away is not twin.led_away or self._device.peer is not None:
            flight.away = twin.led_away
            flight.copies = []
            for at, first, count in twin.runs(flight.pieces):
                source, nbytes = twin.source(first, count)
                flight.copies.append((flight.buffer.range.address + at * self._page, source, nbytes))
        return flight.copies

    def _copy(self, copies: Copies, stream: int) -> Done:
        done = self._transfer.copy(copies, after=stream, owner="kv", to="device")
        self.copied += sum([nbytes for _, _, nbytes in copies])
        return done


def _neighbours(pieces: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the sequence, first, count) of those that follow each other."""
    at = 0
    for place, piece in enumerate(pieces, 1):
        if place == len(pieces) or piece == _TAKEN or pieces[place] != piece + 1:
            if pieces[at] != _TAKEN:
                yield at, pieces[at], place - at
            at = place


_IN_USE: Final = (
    "a KV cache that is streamed from the host is looked at while another thread uses it, or while a CUDA graph is "
    "being captured: look at it between two forwards"
)
