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
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from .kv_twin import Copies, KVTwin


class _Buffer:
    def __init__(self, opened: Range) -> None:
        self.range = opened
        self.holds: _Flight | None = None
        self.done: Done | None = None
        self.stream: int | None = None  # that reads it


@dataclass(eq=False, slots=True)
class _Flight:
    """A layer that flies. `pieces`: in the order in which they lie in the buffer."""

    twin: weakref.ref[KVTwin]
    buffer: _Buffer
    pieces: list[int]


class KVStream:
    """The buffers of one cache, at first none. Not thread-safe."""

    def __init__(self, device: Device, group: Group, transfer: Transfer) -> None:
        """`group`: of all ranges of the cache; `transfer`: the stream of its copies."""
        self.copied = 0  # bytes that came to buffers so far
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
        return min((each.range.pieces for each in self._buffers), default=0)

    @property
    def buffers(self) -> int:
        """How many there are."""
        return len(self._buffers)

    @property
    def pieces(self) -> int:
        """That fly."""
        return sum(len(each.pieces) for each in self._flights)

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
        return len(self._buffers)

    def take_off(self, twins: Sequence[KVTwin]) -> None:
        """What is away of these layers flies, as far as their buffer has room, nobody holds a tensor over it, and
        addresses can be exchanged now. `twins`: in the order in which they compute. DriverError."""
        flights = [self._flight_of(twin) or self._flight(twin, n) for n, twin in enumerate(twins)]
        self._flights = [*flights, *(each for each in self._flights if each not in flights)]
        for twin, flight in zip(twins, flights, strict=True):
            self._lead(flight, twin)

    def enter(self, twin: KVTwin, stream: int) -> None:
        """The layer is about to append and to be read, on `stream`. BallonetError, DriverError."""
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
            if not twin.back(flight.pieces):
                raise BallonetError(_IN_USE)
            flight.pieces.clear()
        twin.flying = False

    def close(self) -> None:
        """Every layer is at rest, and the buffers are given back. Raises as `ground`."""
        for each in self._flights:
            if (twin := each.twin()) is not None:
                self.ground(twin)
        self._flights = []
        self._last = None
        while self._buffers:
            self._buffers.pop().range.close()

    def _flight_of(self, twin: KVTwin) -> _Flight | None:
        return next((each for each in self._flights if each.twin() is twin), None)

    def _flight(self, twin: KVTwin, index: int) -> _Flight:
        """Neighbours use different buffers."""
        return _Flight(weakref.ref(twin), self._buffers[index % len(self._buffers)], [])

    def _lead(self, flight: _Flight, twin: KVTwin) -> None:
        """What is away and does not fly leads to the buffer from now on."""
        at = len(flight.pieces)
        room = flight.buffer.range.pieces - at
        new = [piece for piece in twin.resting() if piece not in flight.pieces][:room]
        if not new or not twin.alone():
            return
        if flight.buffer.holds is flight:
            flight.buffer.holds = None
        twin.flying = True
        flight.pieces += new  # before they are led there: what is at rest may be here, what flies must
        del flight.pieces[at + twin.lead(new, flight.buffer.range, at) :]
        twin.flying = bool(flight.pieces)

    def _next(self, last: _Flight) -> None:
        """All that reads the layer has been launched: its buffer is the next one's."""
        buffer = last.buffer
        if buffer.holds is last and buffer.stream is not None:
            turns = [each for each in self._flights if each.buffer is buffer and each.pieces]
            following = turns[(turns.index(last) + 1) % len(turns)]
            self._vacate(buffer)
            if following is not last:
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
        address = buffer.range.address
        copies = []
        for at, first, count in twin.runs(flight.pieces):
            source, nbytes = twin.source(first, count)
            copies.append((address + at * self._page, source, nbytes))
        buffer.done = self._copy(copies, stream)
        buffer.stream = stream
        buffer.holds = flight

    def _copy(self, copies: Copies, stream: int) -> Done:
        done = self._transfer.copy(copies, after=stream, owner="kv", to="device")
        self.copied += sum(nbytes for _, _, nbytes in copies)
        return done


_IN_USE: Final = (
    "a KV cache that is streamed from the host is looked at while another thread uses it, or while a CUDA graph is "
    "being captured: look at it between two forwards"
)
