"""Slots: device memory that several members take turns in, and the copies that fill it.

A member is what a slot is filled with: a streamed layer's weights, or the pages of a KV layer that lie on the host.

Note [Filling ahead]
    When a member has been read, its slot is free, and the copy of the next one that uses this slot begins, behind the
    copies that were submitted before. So with two slots the copy for a layer starts when the layers before it start to
    compute (Select-N §4.3, SwiftCache §3.2). Streams wait, for events; the host does not.

Note [Overwriting a slot]
    A slot is overwritten once every stream that reads it has passed. Streams are noted when they begin to read: so this
    holds as well where a reader never says that it has ended, and where the next one runs on another stream.

Note [What a slot holds]
    The member in each slot is recorded, and not derived from an index: a pass over the model may end anywhere, by an
    exception or because layers are left out, and the next one finds what is really there. While a copy is submitted the
    slot holds no member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ...allocator._native import Device, Done, Group, Range, Transfer

if TYPE_CHECKING:
    from ...allocator._native import Owner

Copies = list[tuple[int, int, int]]  # (to, from, bytes)
Member = TypeVar("Member")


class Slot(Generic[Member]):
    """Pages of the device in a range of their own. `turns`: the members that use it, in the order in which they are
    read; `holds`: whose bytes are there, or on their way (`done`); `readers`: streams that were given something to read
    it with since it was filled."""

    def __init__(self, opened: Range, turns: Iterable[Member] = ()) -> None:
        self.range = opened
        self.turns = list(turns)
        self.holds: Member | None = None
        self.done: Done | None = None
        self.readers: set[int] = set()


def open_pages(device: Device, group: Group, owner: Owner, pages: int, *, reuse: bool = True) -> Range:
    """Opens a range of device pages, for a slot. PoolExhausted, DriverError: there is none then."""
    opened = device.reserve(pages * device.page_size, owner, group, reuse=reuse)
    try:
        opened.map(0, pages)
    except BaseException:
        opened.close()
        raise
    return opened


class SlotSource(Protocol[Member]):
    """The owner of members, which knows where their bytes come from."""

    def copies(self, member: Member, slot: Slot[Member]) -> Copies:
        """Returns the copies that fill the slot with the member."""

    def filling(self, member: Member, slot: Slot[Member]) -> None:
        """Called before the slot is overwritten with the member."""


class Filler(Generic[Member]):
    """Fills slots by one stream of copies, in the order of submission. Not thread-safe."""

    def __init__(
        self,
        transfer: Transfer,
        owner: Owner,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`owner`: of the bytes, for statistics. `waiting()` is entered around each wait of a stream for a copy.
        Holds no reference to the source, which holds this: slots are freed with their owner, at once."""
        self.copied = 0  # bytes so far
        self._transfer = transfer
        self._owner = owner
        self._waiting = waiting

    def fill(self, source: SlotSource[Member], slot: Slot[Member], member: Member, after: int | None = None) -> None:
        """Fills the slot with the member, once its readers have passed, and what the stream `after` was given so far.
        See Note [Overwriting a slot]. DriverError."""
        if slot.holds == member:
            return
        source.filling(member, slot)
        slot.holds = None
        streams = sorted(slot.readers if after is None else {*slot.readers, after})
        for stream in streams[:-1]:
            self.copy([], stream)  # copies are made in the order of their submission
        slot.done = self.copy(source.copies(member, slot), streams[-1] if streams else None)
        slot.holds = member
        slot.readers.clear()

    def read(self, source: SlotSource[Member], slot: Slot[Member], member: Member, stream: int) -> None:
        """Has `stream` read the member in the slot from now on. DriverError."""
        if slot.holds != member:
            self.fill(source, slot, member, stream)
        slot.readers.add(stream)
        assert slot.done is not None
        with self._waiting():
            slot.done.before(stream)

    def copy(self, copies: Copies, after: int | None) -> Done:
        """Submits copies to the device. With `after` None they wait for every stream. DriverError."""
        done = self._transfer.copy(copies, after=after, owner=self._owner, to="device")
        for _, _, nbytes in copies:
            self.copied += nbytes
        return done
