"""Anything, in any order: the core keeps its contract after every step.

What must be so is checked from outside as far as it can be: the blocks of the memfds, /proc/self/maps, and the bytes
behind every address. The model knows what lies where, which pages nothing could free (`Machine.must_stay`), and what
the entries of the reclaim list would give (`Machine.offered`): so it is known exactly when memory may be refused, who
gives pages, and in which order. With faults, at any driver call, no more is promised than that nothing is lost.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, BudgetInUse, PoolExhausted

from . import core as outside
from .core import Core, Other, backings, calls, clean, current_context, driver, holds, make, physical, write
from .faulting import arm, disarm, faults_fired, pending

STREAMS = 3  # and stream 0
GROUPS = 2
HOST_BUDGET, PEER_BUDGET = 6, 3  # pages
MAPPING = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemAddressReserve")
EVENTS = ("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuCtxSynchronize")
OTHERS = (
    "cuMemAddressFree",
    "cuMemcpyAsync",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuThreadExchangeStreamCaptureMode",
)
COUNTED = ("allocations", "frees", "allocated_total", "freed_total")
# As they are counted: from there to there.
WAYS = {
    ("device", "host"): "d2h",
    ("host", "device"): "h2d",
    ("device", "peer"): "d2p",
    ("peer", "device"): "p2d",
    ("peer", "host"): "p2h",
    ("host", "peer"): "d2p",  # a page of the host in an entry that is taken
}

# Rules that a machine has which is not only about what entries give.
everywhere = precondition(lambda self: not self.giving)
NTH = st.integers(0, 63)
ENDS = st.tuples(NTH, NTH)
LIMITS = st.one_of(st.none(), st.none(), st.integers(0, 4))
PARTS = st.lists(st.tuples(NTH, NTH, st.integers(1, 3), st.booleans(), LIMITS), min_size=1, max_size=5)
T = TypeVar("T")
values = itertools.count()


def pick(some: Sequence[T], n: int) -> T | None:
    """The nth of some, counted round and round; what there is may depend on time, what hypothesis draws may not."""
    return some[n % len(some)] if some else None


def fresh() -> int:
    """A byte that differs from those before it."""
    return next(values) % 251 + 1


@dataclass(eq=False)
class Page:
    """A physical page as the model sees it: who put it there, and the byte that fills it."""

    place: str
    value: int


@dataclass(eq=False)
class Space:
    """A range, what lies behind its pieces, how many tensors hold each, and how often each has changed."""

    range: _native.Range
    group: int
    retires: bool  # pieces go with their last tensor
    keeps: bool  # pages that retire stay, free
    stretch: int  # pieces that its addresses are for
    pages: list[Page | None]
    pins: list[int]
    alias: list[bool]
    doomed: list[bool]
    changes: list[int]
    tensors: list[tuple[object, range]] = field(default_factory=list)
    closed: bool = False

    def lead(self, piece: int, page: Page | None, alias: bool = False) -> None:
        self.pages[piece], self.alias[piece] = page, alias
        self.changes[piece] += 1

    def drop(self, piece: int) -> None:
        self.lead(piece, None)
        self.doomed[piece] = False

    def owns(self, piece: int) -> bool:
        """A page of its own that is not to go."""
        return self.pages[piece] is not None and not self.alias[piece] and not self.doomed[piece]


class Piece(NamedTuple):
    """A piece of an entry, and the one that its page goes to."""

    home: Space
    i: int
    twin: Space
    j: int


@dataclass(eq=False)
class Entry:
    """An entry of the reclaim list. `limit`: pages that it gives at most, piece by piece; None: all or nothing."""

    key: int
    parts: list[tuple[Space, range, Space, int]]
    limit: int | None
    then: dict[tuple[Space, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for home, i, twin, j in self.pieces():
            self.then[id(home), i], self.then[id(twin), j] = home.changes[i], twin.changes[j]  # type: ignore[index]
        self.dead = self.limit is None and any(
            not piece.home.owns(piece.i) or piece.twin.alias[piece.j] or piece.twin.doomed[piece.j]
            for piece in self.pieces()
        )

    @property
    def group(self) -> int:
        return self.parts[0][0].group

    @property
    def kv(self) -> bool:
        return self.parts[0][0].range.owner == "kv"

    def pieces(self) -> list[Piece]:
        """The pieces of all parts in turns, the first ones first."""
        placed = [
            (i, number, Piece(home, i, twin, at + i - span.start))
            for number, (home, span, twin, at) in enumerate(self.parts)
            for i in span
        ]
        return [piece for *_, piece in sorted(placed, key=lambda each: each[:2])]

    def as_then(self, piece: Piece) -> bool:
        home, i, twin, j = piece
        now = home.changes[i], twin.changes[j]
        return now == (self.then[id(home), i], self.then[id(twin), j]) and not home.closed and not twin.closed  # type: ignore[index]

    def void(self) -> bool:
        self.dead = self.dead or not all(map(self.as_then, self.pieces()))
        return self.dead

    def native(self, groups: list[_native.Group]) -> _native.Entry:
        parts: list[_native.Part] = [
            (home.range, span.start, len(span), twin.range, at, []) for home, span, twin, at in self.parts
        ]
        return self.key, groups[self.group], parts


@dataclass
class Room:
    """Pages for what is taken."""

    host: int
    peer: int

    def holds(self, lacking: int, kv: bool) -> bool:
        near = min(lacking, self.peer) if kv else 0
        if lacking - near > self.host:
            return False
        self.peer -= near
        self.host -= lacking - near
        return True


class Offered(NamedTuple):
    """What entries give where so many pages are missing: (key, pages) in order, and the sums of those that can be taken
    and of those that other threads lease."""

    given: list[tuple[int, int]]
    ready: int
    leased: int


class State(NamedTuple):
    """All that the device's thread changes."""

    created: int
    unmapped: int
    backings: list[list[str]]
    pages: list[list[int]]


@dataclass(eq=False)
class Block:
    address: int
    nbytes: int
    stream: int
    value: int
    size: int
    places: dict[int, str] = field(default_factory=dict)  # of its pages, by their number
    users: set[int] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    page = 4096
    faulty = True
    giving = False  # what entries give, and little else

    def __init__(self) -> None:
        super().__init__()
        clean()
        self.other = Other()

    @initialize(
        budget=st.sampled_from([10, 14, 24]),
        options=st.sampled_from([{}, {"spill": True}, {"peer": 1}]),
        keeps=st.booleans(),
        pieces=st.integers(2, 6),
        cached=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), max_size=2),
    )
    def open(
        self, budget: int, options: dict[str, Any], keeps: bool, pieces: int, cached: list[tuple[int, int]]
    ) -> None:
        self.budget = budget
        self.spills = "spill" in options
        self.most = {"host": HOST_BUDGET, "peer": PEER_BUDGET if "peer" in options else 0}
        peer = {"peer_budget": PEER_BUDGET * self.page} if "peer" in options else {}
        self.core = Core(make(self.page, self.budget, HOST_BUDGET, **options, **peer), self.page)
        self.device = self.core.device
        self.reserved = self.addresses()
        self.streams = [0, *(self.core.stream() for _ in range(STREAMS))]
        self.spaces: list[Space] = []
        self.blocks: list[Block] = []
        self.groups = [self.device.group() for _ in range(GROUPS)]
        self.mine, self.theirs, self.unpinned = ([0] * GROUPS for _ in range(3))  # leases; tensors that went
        self.closed: list[Space] = []  # the last one of each address
        self.entries: list[Entry] = []
        self.keys = (n ^ 5 for n in itertools.count())  # not in the order of the list
        self.given: list[tuple[int, int]] = []  # by entries, in the last call: (key, pages)
        self.reclaimed = self.last_take = 0  # pages that they gave in all; when the last one did
        self.wanted: int | None = 0  # pages that somebody who leases is asked for; None where that is not known
        self.copied: Counter[str] = Counter()
        self.announced = self.follow = False  # ranges are to come; pages may come at any moment
        self.counts = Counter[str]()
        self.peaks = Counter[str]()
        for number, owner in enumerate(("weights", "kv", "weights")):
            self.reserve(8, owner, 0, 0, False, 0, keeps and owner == "kv")
            if number < 2:
                self.map(number, (0, pieces - 1), "device")
        for number, (stretch, mapped) in enumerate(cached, 3):
            self.reserve(stretch, "kv", 0, 0, False, 0, False)
            self.map(number, (0, min(stretch, mapped) - 1), "device")
        for _ in cached:
            self.close_range(3, (1, 0), False)

    # -- what the model knows -----------------------------------------------------------------------------------------

    def seen(self, block: Block) -> range:
        """The pages, by address, that a block lies on."""
        return range(block.address // self.page, (block.address + block.nbytes - 1) // self.page + 1)

    def must_stay(self, place: str = "device") -> int:
        """Pages that no trim and no wait can free."""
        lanes = STREAMS if place == "device" else 0  # a page for each stream to copy to
        mapped = {page for space in self.spaces for page in space.pages if page and page.place == place}
        return lanes + len(mapped) + self.under_blocks(place)

    def under_blocks(self, place: str) -> int:
        return len({number for block in self.blocks for number, where in block.places.items() if where == place})

    def room(self) -> Room:
        return Room(*(self.most[place] - self.must_stay(place) for place in ("host", "peer")))

    def shown(self) -> Counter[Page]:
        return Counter(page for space in self.spaces for page in space.pages if page)

    def offered(self, missing: float, leases: list[int], room: Room | None = None) -> Offered:
        """What entries give, in their order, to a thread where others hold these leases."""
        room, shown = room or self.room(), self.shown()
        given, leased, ready = [], [], 0
        for entry in self.entries:
            if ready >= missing:
                break
            pages, lacking, later = self.offer(entry, missing - ready, room, shown)
            if leases[entry.group]:
                leased.append((pages, lacking, entry.kv))
            elif pages and not later and room.holds(lacking, entry.kv):
                given.append((entry.key, pages))
                ready += pages
        return Offered(given, ready, sum(pages for pages, *needs in leased if room.holds(*needs)))

    def offer(self, entry: Entry, most: float, room: Room, shown: Counter[Page]) -> tuple[int, int, bool]:
        """Pages that an entry would give, those that it would need elsewhere, and whether it cannot give them now."""
        if entry.limit is not None:
            chosen = list(self.divided(entry, min(entry.limit, most), room, shown))
            return len(chosen), sum(twin.pages[j] is None for _, _, twin, j in chosen), False
        if entry.void():
            return 0, 0, True
        homes = [home.pages[i] for home, i, *_ in entry.pieces()]
        twins = [twin.pages[j] for *_, twin, j in entry.pieces()]
        later = any(shown[page] > 1 for page in homes if page) or any(page and page.place == "device" for page in twins)
        lacking = twins.count(None)
        later = later or not self.room().holds(lacking, entry.kv)
        return sum(page is not None and page.place == "device" for page in homes), lacking, later

    def divided(self, entry: Entry, most: float, room: Room, shown: Counter[Page]) -> Iterator[Piece]:
        room = Room(room.host, room.peer)
        for piece in entry.pieces():
            home, i, twin, j = piece
            page, there = home.pages[i], twin.pages[j]
            if most <= 0 or page is None or page.place != "device" or not home.owns(i) or not entry.as_then(piece):
                continue
            if shown[page] > 1 or (there and (twin.alias[j] or twin.doomed[j] or there.place == "device")):
                continue
            if room.holds(there is None, entry.kv):
                most -= 1
                yield piece

    def follow_takes(self) -> None:
        """What entries have given meanwhile leads to the twins."""
        shown = self.shown()
        for time, key, pages in self.device.taken():
            assert time > self.last_take
            self.last_take = time
            self.reclaimed += pages
            (entry,) = (candidate for candidate in self.entries if candidate.key == key)
            pieces = entry.pieces()
            if entry.limit is not None:
                entry.limit -= pages
                pieces = [piece for piece in pieces if piece.home.owns(piece.i) and self.is_elsewhere(piece)]
                if not self.faulty:
                    room = Room(math.inf, math.inf)  # type: ignore[arg-type]
                    assert pieces == list(self.divided(entry, pages, room, shown)) or self.room().host < pages
            else:
                self.entries.remove(entry)
            own = [piece for piece in pieces if (page := piece.home.pages[piece.i]) and page.place == "device"]
            assert len(own) == pages
            near = self.room().peer if entry.kv else 0
            places = [place for piece in pieces if (place := self.goes_to_its_twin(piece))]
            assert self.faulty or places.count("peer") == min(near, len(places))
            self.given.append((key, pages))

    def is_elsewhere(self, piece: Piece) -> bool:
        return piece.home.range.leads_to(piece.i) == "alias"

    def goes_to_its_twin(self, piece: Piece) -> str:
        """The place of the twin's page, if that is new."""
        home, i, twin, j = piece
        page, made = home.pages[i], ""
        assert page is not None
        if twin.pages[j] is None:
            made = twin.range.place(j)
            twin.lead(j, Page(made, page.value))
            self.was_copied(home, page.place, made)
        home.lead(i, twin.pages[j], alias=True)
        return made

    def was_copied(self, space: Space, begin: str, end: str) -> None:
        if begin == end or space.range.owner == "activations":
            return
        weights = "d2h" if end == "host" else "h2d"  # wherever they were
        way = weights if space.range.owner == "weights" else WAYS[begin, end]
        self.copied[f"{space.range.owner}_{way}"] += self.page

    def attempt(self, work: Callable[[], T], refused: bool | None = False) -> T | None:
        """`work`, again where a fault struck it; None where it was refused for want of memory.

        `refused` says whether it must be; None where that depends on what has passed meanwhile.
        """
        self.given = []
        for _ in range(9):
            before = faults_fired()
            try:
                done = work()
            except PoolExhausted:
                if refused or refused is None:
                    return None
                assert faults_fired() > before, "refused although there is memory"
            except BallonetError:
                if faults_fired() == before:
                    raise
            else:
                assert not refused, "more memory was given than there is"
                return done
            finally:
                self.follow_takes()
            self.everything_holds()
        raise AssertionError("fails again and again")

    def ask(self, work: Callable[[], T], pages: int, known: bool = True, pieces: int = 0) -> T | None:
        """`work`, on so many pieces, needs so many device pages; `known`: exactly so many, and none that are kept."""
        if self.entries and not self.faulty:
            self.settle()
        missing = pages - (self.budget - self.must_stay())
        offered = self.offered(missing, self.theirs) if missing > 0 else Offered([], 0, 0)
        refused = missing > 0 and offered.ready < missing
        exact = known and not self.faulty
        self.device.events()
        done = self.attempt(work, None if (refused and not known) or (self.faulty and self.entries) else refused)
        kinds = [(kind, count) for _, kind, count, *_ in self.device.events()]
        if exact:
            assert self.given == ([] if refused else offered.given)
            assert [kind for kind in kinds if kind[0] == "refuse"] == [("refuse", pieces)] * refused
            assert [count for kind, count in kinds if kind == "take"] == [count for _, count in self.given]
        if refused and offered.leased and offered.ready + offered.leased >= missing:
            self.wanted = max(self.wanted, pages) if exact and self.wanted is not None else None
        return done

    def settle(self) -> None:
        self.attempt(lambda: self.device.reap(wait=True))

    # -- ranges -------------------------------------------------------------------------------------------------------

    def a_space(self, n: int) -> Space | None:
        return pick([space for space in self.spaces if not space.closed], n)

    def kind(self, space: Space) -> tuple[int, _native.Owner]:
        return space.group, space.range.owner

    def a_span(self, space: Space, ends: tuple[int, int]) -> range:
        first, last = sorted(n % len(space.pages) for n in ends)
        return range(first, last + 1)

    @everywhere
    @rule(
        pieces=st.integers(1, 12),
        owner=st.sampled_from(["weights", "weights", "kv", "kv", "activations"]),
        group=st.integers(0, GROUPS - 1),
        expected=st.integers(0, 12),
        reuse=st.booleans(),
        more=st.sampled_from([0, 0, 0, 2]),
        keeps=st.booleans(),
    )
    def reserve(
        self, pieces: int, owner: _native.Owner, group: int, expected: int, reuse: bool, more: int, keeps: bool
    ) -> None:
        if sum(not space.closed for space in self.spaces) == 5:
            return
        retires, stretch = owner == "weights" and keeps, pieces
        nbytes = max(0, expected * self.page - pieces % 2)  # in whole pages the same
        soon: dict[str, Any] = {"expected": nbytes, "reuse": reuse, "more": more, "keeps": keeps}
        if not self.faulty:
            self.settle()
        cached = self.cached() if not self.faulty and not self.follow else {}
        made = self.attempt(lambda: self.device.reserve(pieces * self.page, owner, self.groups[group], retires, **soon))
        assert made is not None
        self.announced = self.announced or (more > 0 and owner == "kv")
        self.follow = self.follow or self.announced
        self.closed = [other for other in self.closed if other.range.address != made.address]
        if owner == "kv" and reuse and cached:
            fitting = [address for address, (size, _) in cached.items() if size >= pieces]
            keys = {address: self.fit(*cached[address], expected) for address in fitting}
            assert (made.address in fitting) == bool(fitting)
            assert not fitting or made.address == min(reversed(fitting), key=lambda each: keys[each])
            stretch = cached[made.address][0] if fitting else pieces
        else:
            assert made.address not in cached
        empty: list[Any] = [None] * pieces
        zeros, no = [0] * pieces, [False] * pieces
        self.spaces.append(
            Space(made, group, retires, keeps and owner == "kv", stretch, empty, [*zeros], [*no], [*no], [*zeros])
        )

    def cached(self) -> dict[int, tuple[int, int]]:
        """Address -> pieces, and pages: closed ranges of KV whose pages are still there. Pre: nothing retires."""
        table, stretches = AddressTable(self.page), {}
        others = [(address, nbytes) for address, nbytes, *_ in self.device.segments() if address]
        others += [(s.range.address, s.stretch * self.page) for s in self.spaces if not s.closed]
        for space in self.closed:
            address, nbytes = space.range.address, space.stretch * self.page
            if space.range.owner != "kv" or any(space.pins):
                continue
            if any(begin < address + nbytes and address < begin + size for begin, size in others):
                continue
            mapped = sum(table.place(address + i * self.page) == "device" for i in range(space.stretch))
            if mapped:
                stretches[address] = space.stretch, mapped
        return stretches

    def fit(self, pieces: int, mapped: int, expected: int) -> tuple[bool, int, int]:
        """The less the better (eLLM §4.2.2)."""
        return mapped < expected, mapped if mapped >= expected else -mapped, pieces

    @rule(n=NTH, ends=ENDS, place=st.sampled_from(["device", "device", "device", "host", "peer"]))
    def map(self, n: int, ends: tuple[int, int], place: str) -> None:
        if (space := self.a_space(n)) is None or (place == "peer" and not self.most["peer"]):
            return
        span = self.a_span(space, ends)
        if any(page and (page.place != place or space.alias[i]) for i, page in enumerate(space.pages) if i in span):
            with pytest.raises(BallonetError):
                self.mapping(space, span, place)()
            return
        new = [i for i in span if space.pages[i] is None]
        named = {
            side for entry in self.entries for home, i, twin, j in entry.pieces() for side in ((home, i), (twin, j))
        }
        lacks = self.faulty or self.must_stay() + len(new) > self.budget  # a page that cannot be made lacks, too
        if named & {(space, i) for i in span} and place == "device" and lacks:
            return  # what is taken for it would be in its way
        before = [space.range.leads_to(i) for i in new]
        unsure = "pending_free" in before or (self.spills and place == "host")
        aliased = self.pages_behind_aliases(place)
        if place == "device":
            done = self.map_pages(space, span, new)
        else:
            refused: bool | None = bool(new) and self.must_stay(place) + len(new) > self.most[place]
            done = self.attempt(self.mapping(space, span, place), None if refused and unsure else refused)
        if done is None:
            return
        for i in span:
            space.doomed[i] = False
        table = AddressTable(self.page)
        for i in new:
            offset = table.behind(space.range.address + i * self.page)[2]
            space.lead(i, aliased.get(offset) or Page(place, fresh()))
            self.write_piece(space, i)

    def map_pages(self, space: Space, span: range, new: list[int]) -> bool | None:
        """Free pages go first, then those of cached ranges, of the oldest first, then new ones, then what is kept."""
        if not self.faulty:
            self.settle()
        leads = [space.range.leads_to(i) for i in new]
        known = not {"pending_free", "kept"} & {*leads}  # a page that an alias still shows may be taken back
        before, cached, kept = self.device.snapshot(), self.cached(), self.kept()
        done = self.ask(self.mapping(space, span, "device"), len(new), known, len(span))
        if self.faulty or self.follow or before["ahead"] or done is None or self.given:
            return done
        after, now, still = self.device.snapshot(), self.cached(), self.kept()
        mapped = [snapshot["driver_calls"]["cuMemMap"] for snapshot in (before, after)]
        assert mapped[1] - mapped[0] == leads.count("none")  # what is kept is there
        kept[space] -= leads.count("kept")
        spare = sum(pages for holder, pages in kept.items() if holder.keeps)
        lacking = leads.count("none") - (before["pages"]["free"] - spare - leads.count("kept"))
        new_ones, may = after["created"] - before["created"], self.budget - before["created"]
        assert new_ones == min(max(0, lacking), may) if lacking <= may + spare else new_ones <= may
        assert all(still[holder] == pages for holder, pages in kept.items() if holder.keeps) or new_ones == may
        left = [now.get(address, (0, 0))[1] for address in cached]
        touched = [n for n, (_, pages) in enumerate(cached.values()) if left[n] < pages]
        assert not touched or not any(left[: max(touched)])
        return done

    def kept(self) -> dict[Space, int]:
        """Pages that are kept behind the addresses of ranges, but for cached ones."""
        return {space: backings(space.range).count("kept") for space in self.spaces}

    def pages_behind_aliases(self, place: str) -> dict[int, Page]:
        """By offset in the memfd of that place: what retires there, and an alias still shows, may be taken back."""
        table = AddressTable(self.page)
        return {
            table.behind(space.range.address + i * self.page)[2]: page
            for space in self.spaces
            for i, page in enumerate(space.pages)
            if page is not None and space.alias[i] and page.place == place
        }

    def mapping(self, space: Space, span: range, place: str) -> Callable[[], bool]:
        function = {"device": space.range.map, "host": space.range.map_host, "peer": space.range.map_peer}[place]

        def work() -> bool:
            function(span.start, len(span))
            return True

        return work

    @rule(n=NTH, m=NTH, which=NTH)
    def alias(self, n: int, m: int, which: int) -> None:
        space, source = self.a_space(n), self.a_space(m)
        if space is None or source is None:
            return
        shown = self.shown()
        pairs = [
            (i, j)
            for i, j in itertools.product(range(len(space.pages)), range(len(source.pages)))
            if source.pages[j]
            and not source.alias[j]
            and not space.doomed[i]
            and ((page := space.pages[i]) is None or space.alias[i] or (shown[page] == 1 and not self.faulty))
            and (space, i) != (source, j)
        ]
        if (pair := pick(pairs, which)) is None:
            return
        self.lead(space, pair[0], source, pair[1])

    def lead(self, space: Space, piece: int, source: Space, slot: int) -> None:
        if not self.faulty:
            self.settle()  # what showed the page before may still be retiring
        if space.pages[piece]:
            self.not_under_a_lease(space.group, lambda: space.range.alias(piece, source.range, slot, 1))
        led = self.attempt(lambda: (space.range.alias(piece, source.range, slot, 1),))
        assert led is not None
        # Where another thread reads, nothing is led elsewhere.
        assert led[0] == (space.pages[piece] is None or not self.theirs[space.group])
        if led[0]:
            space.lead(piece, source.pages[slot], alias=True)

    @rule(n=NTH, ends=ENDS)
    def own(self, n: int, ends: tuple[int, int]) -> None:
        if (space := self.a_space(n)) is None:
            return
        span = self.a_span(space, ends)
        if self.theirs[space.group]:
            assert not space.range.own(span.start, len(span))
            return
        if not all(space.alias[i] and not space.doomed[i] for i in span):
            with pytest.raises(BallonetError):
                space.range.own(span.start, len(span))
            return
        self.not_under_a_lease(space.group, lambda: space.range.own(span.start, len(span)))
        if self.ask(lambda: space.range.own(span.start, len(span)) or None, len(span), True, len(span)):
            for i in span:
                space.lead(i, Page("device", fresh()))
                self.write_piece(space, i)

    @everywhere
    @rule(n=NTH, m=NTH, which=NTH, over=st.booleans())
    def exchange(self, n: int, m: int, which: int, over: bool) -> None:
        """A page comes to other addresses, with its bytes: to those that lead elsewhere, or to a twin and what leads
        there."""
        if (space := self.a_space(n)) is None:
            return
        homes = [other for other in self.spaces if self.kind(other) == self.kind(space) and not other.closed]
        spare = homes[m % len(homes)]
        pairs = [
            (i, j, home)
            for i, j in itertools.product(range(len(space.pages)), range(len(spare.pages)))
            if spare.owns(j) and (space.owns(i) if over else space.alias[i] and not space.doomed[i])
            for home in homes[: 9 if over else 1]
            if (space, i) != (spare, j) and (not over or i < len(home.pages))
        ]
        if (pair := pick(pairs, which)) is None:
            return
        piece, slot, home = pair
        page, old, shown = spare.pages[slot], space.pages[piece], self.shown()
        assert page is not None
        assert old is not None
        leads = over and home.alias[piece] and home.pages[piece] is old
        free = shown[page] == 1 and not self.theirs[space.group]
        if over:
            self.not_under_a_lease(space.group, lambda: space.range.take_over(piece, spare.range, slot, 1, home.range))
            done = self.attempt(lambda: (space.range.take_over(piece, spare.range, slot, 1, home.range),))
            may = free and shown[old] == (2 if leads else 1)
        elif page.place != "device" and not self.theirs[space.group]:
            with pytest.raises(BallonetError):
                space.range.adopt(piece, spare.range, slot, 1)
            return
        else:
            self.not_under_a_lease(space.group, lambda: space.range.adopt(piece, spare.range, slot, 1))
            done = self.attempt(lambda: (space.range.adopt(piece, spare.range, slot, 1),))
            may = free and not spare.pins[slot]
        assert done == (may,) or (done == (False,) and shown[page] == 1)  # what shows it may still be retiring
        if done == (True,):
            spare.lead(slot, None)
            if over:
                space.pages[piece] = page  # the bytes are thought to be the same: no change
                home.pages[piece] = page if leads else home.pages[piece]
            else:
                space.lead(piece, page)

    @everywhere
    @rule(n=NTH, ends=ENDS, wait=st.booleans())
    def map_ahead(self, n: int, ends: tuple[int, int], wait: bool) -> None:
        """Whether these pieces have pages then is nobody's business before they are mapped."""
        if (space := self.a_space(n)) is None or space.range.owner != "kv":
            return
        span = self.a_span(space, ends)
        space.range.map_ahead(span.start, len(span))
        self.follow = True
        if wait:
            self.settle()
            self.follow = self.announced

    @everywhere
    @rule(n=NTH, kept=st.booleans())
    def drop_kept(self, n: int, kept: bool) -> None:
        self.settle()
        pieces = [(space, i) for space in self.spaces if not space.closed for i in range(len(space.pages))]
        if (taken := pick([pair for pair in pieces if (pair[0].range.leads_to(pair[1]) == "kept") == kept], n)) is None:
            return
        (space, piece), before = taken, faults_fired()
        dropped = space.range.drop_kept(piece)
        assert dropped == kept or faults_fired() > before
        assert not dropped or space.range.leads_to(piece) == "none"

    @rule(n=NTH, ends=ENDS)
    def retire(self, n: int, ends: tuple[int, int]) -> None:
        if (space := self.a_space(n)) is None:
            return
        span = self.a_span(space, ends)
        stay = self.stay(space, span) if space.keeps else []
        self.attempt(lambda: (space.range.retire(span.start, len(span)), True))
        self.gone(space, span)
        if stay:
            self.settle()
            assert {space.range.leads_to(i) for i in stay} == {"kept"}

    def stay(self, space: Space, span: Sequence[int]) -> list[int]:
        """The pieces whose pages are to stay there, free, once they retire."""
        if space.range.owner != "kv" or self.faulty:
            return []
        shown = self.shown()
        return [
            i
            for i in span
            if (page := space.pages[i])
            and page.place == "device"
            and space.owns(i)
            and not space.pins[i]
            and shown[page] == 1
        ]

    def gone(self, space: Space, span: Sequence[int]) -> None:
        for i in span:
            if space.pages[i] is None:
                continue
            if space.pins[i]:
                space.doomed[i] = True
                space.changes[i] += 1
            else:
                space.drop(i)

    @everywhere
    @rule(
        n=NTH,
        out=ENDS,
        back=ENDS,
        stream=st.integers(1, STREAMS),
        place=st.sampled_from(["device", "device", "host", "peer"]),
    )
    def shrink_and_grow(self, n: int, out: tuple[int, int], back: tuple[int, int], stream: int, place: str) -> None:
        """What retires while a stream is busy is taken back, among pieces that need pages of their own."""
        self.occupy(stream)
        self.retire(n, out)
        self.map(n, back, place)

    @rule(n=NTH, which=NTH, place=st.sampled_from(["device", "host", "peer"]))
    def move(self, n: int, which: int, place: str) -> None:
        if (space := self.a_space(n)) is None or (place == "peer" and not self.most["peer"]):
            return
        piece = which % len(space.pages)
        page = space.pages[piece]
        if place == "peer" and (page is None or page.place != "device" or space.range.owner != "kv"):
            return
        if not self.faulty:
            self.settle()
        free = self.device.available if place == "device" else getattr(self.room(), place)
        may = page is not None and space.owns(piece) and self.shown()[page] == 1 and free > 0
        self.not_under_a_lease(space.group, lambda: space.range.move(piece, place))  # type: ignore[arg-type]
        moved = self.attempt(lambda: (space.range.move(piece, place),))  # type: ignore[arg-type]
        assert moved is not None
        assert self.faulty or self.spills or moved[0] == (may and not self.theirs[space.group])
        if not moved[0]:
            return
        assert page is not None
        assert space.owns(piece)
        self.was_copied(space, page.place, place)
        page.place = place

    @everywhere
    @rule(n=NTH, ends=ENDS)
    def make_tensor(self, n: int, ends: tuple[int, int]) -> None:
        if (space := self.a_space(n)) is None:
            return
        span = self.a_span(space, ends)
        arguments = (span.start * self.page, (len(span) * self.page,), (1,), 1, 8)
        if any(space.pages[i] is None or space.doomed[i] for i in span):
            with pytest.raises(BallonetError):
                space.range.tensor(*arguments)
            return
        space.tensors.append((space.range.tensor(*arguments), span))
        for i in span:
            space.pins[i] += 1

    @everywhere
    @rule(n=NTH, which=NTH)
    def drop_tensor(self, n: int, which: int) -> None:
        if (space := pick([space for space in self.spaces if space.tensors], n)) is None:
            return
        _, span = space.tensors.pop(which % len(space.tensors))
        self.unpinned[space.group] += 1
        for i in span:
            space.pins[i] -= 1
        self.gone(space, [i for i in span if space.pins[i] == 0 and (space.doomed[i] or space.retires)])
        if space in self.closed:  # it is the newest of the cached ones
            self.closed.remove(space)
            self.closed.append(space)
            self.settle()

    @everywhere
    @rule(n=NTH, ends=ENDS, again=st.booleans())
    def close_range(self, n: int, ends: tuple[int, int], again: bool) -> None:
        """Closes a range, of which others may show a page, and another one comes, as one request after the other
        does."""
        if (space := self.a_space(n)) is None:
            return
        if ends[0] % 4 == 0:
            self.alias(ends[1], n, ends[1])
        every = range(len(space.pages))
        stay = self.stay(space, every)
        self.attempt(lambda: (space.range.close(), True))
        space.closed = True
        self.gone(space, every)
        self.closed = [other for other in self.closed if other.range.address != space.range.address] + [space]
        if again or not self.faulty:
            self.settle()
        if stay and not self.follow:  # or they serve what is mapped ahead
            table = AddressTable(self.page)
            assert all(table.place(space.range.address + i * self.page) == "device" for i in stay)
        if again:
            pieces = len(space.pages)
            owner = "weights" if ends[1] % 2 == 0 else space.range.owner
            self.reserve(pieces, owner, space.group, ends[0] % pieces, True, 0, False)
            self.map(len([other for other in self.spaces if not other.closed]) - 1, ends, "device")

    @everywhere
    @rule(n=NTH, stream=st.integers(0, STREAMS))
    def read(self, n: int, stream: int) -> None:
        """Work on a stream reads a range: its pages may not leave before that has passed."""
        if (space := self.a_space(n)) is None:
            return
        for i, page in enumerate(space.pages):
            if page is not None:
                self.device.note_stream(self.streams[stream])
                self.device.note_use(space.range.address + i * self.page, self.page, self.streams[stream], False)

    # -- who gives pages ----------------------------------------------------------------------------------------------

    @rule(drawn=PARTS, own=st.booleans(), anything=st.booleans())
    def publish(self, drawn: list[tuple[int, int, int, bool, int | None]], own: bool, anything: bool) -> None:
        """`drawn`: parts, as (piece, twin's piece, count, does it go with the part before?, limit). `own`: once what
        was taken is back. `anything`: also what cannot be taken."""
        for n, space in enumerate(other for other in self.spaces if not other.closed):
            for i in range(len(space.pages) * own):
                if space.alias[i] and not space.doomed[i] and self.must_stay() < self.budget:
                    self.own(n, (i, i))
        every = [(space, i) for space in self.spaces if not space.closed for i in range(len(space.pages))]
        shown = self.shown()
        used: set[tuple[Space, int]] = set()
        parts: list[list[tuple[Space, range, Space, int]]] = []
        limits: list[int | None] = []
        for n, m, count, joins, limit in drawn:
            homes = [
                (one, i)
                for one, i in every
                if anything or (one.owns(i) and (page := one.pages[i]) and page.place == "device" and shown[page] == 1)
            ]
            if (home := pick([candidate for candidate in homes if candidate not in used], n)) is None:
                continue
            twins = [
                (one, i)
                for one, i in every
                if one is not home[0] and one.group == home[0].group and one.range.owner == "weights"
                if anything or not (page := one.pages[i]) or page.place != "device"
            ]
            if (twin := pick([candidate for candidate in twins if candidate not in used], m)) is None:
                continue
            count = min(count, len(home[0].pages) - home[1], len(twin[0].pages) - twin[1])
            pieces = {(one, at + i) for one, at in (home, twin) for i in range(count)}
            if used & pieces:
                continue
            used |= pieces
            part = home[0], range(home[1], home[1] + count), *twin
            if joins and parts and self.kind(home[0]) == self.kind(parts[-1][0][0]):
                parts[-1].append(part)
            else:
                parts.append([part])
                limits.append(limit)
        self.entries = [Entry(next(self.keys), *fields) for fields in zip(parts, limits, strict=True)]
        limited = {entry.key: entry.limit for entry in self.entries if entry.limit is not None}
        self.device.publish([entry.native(self.groups) for entry in self.entries], limited)

    @rule(
        drawn=PARTS,
        own=st.booleans(),
        over=st.integers(-1, 4),
        way=st.sampled_from(["map", "map", "own", "allocate", "budget"]),
        leased=st.booleans(),
        held=st.booleans(),
        stream=st.integers(0, STREAMS),
    )
    def lack(self, drawn: Any, own: bool, over: int, way: str, leased: bool, held: bool, stream: int) -> None:
        """Somebody needs so many pages more than anything but entries can give, also while another thread leases, or
        this one."""
        self.publish(drawn, own, anything=False)
        for group in range(GROUPS * held):
            self.lease(group, theirs=False, leaves=False)
        if leased:
            self.lease(0, theirs=True, leaves=False)
        pages = self.budget - self.must_stay() + over
        opened = sum(not space.closed for space in self.spaces)
        if way == "budget":
            self.set_budget(-over)
        elif pages > 0 and way == "allocate":
            self.allocate(pages * self.page, stream)
        elif pages > 0 and opened < 5:
            self.reserve(pages, "weights", 1, 0, False, 0, False)
            if way == "own":
                self.lead_to_another(opened)
                self.own(opened, (0, pages - 1))
            else:
                self.map(opened, (0, pages - 1), "device")
            self.everything_holds()
            self.close_range(opened, (0, 0), False)
        for group in range(GROUPS * held):
            self.lease(group, theirs=False, leaves=True)
        if leased:
            self.other_yields()
            self.lease(0, theirs=True, leaves=True)

    def lead_to_another(self, n: int) -> None:
        """All pieces of the nth range lead to one page, which no entry gives."""
        named = {(home, i) for entry in self.entries for home, i, *_ in entry.pieces()}
        others = [(other, j) for other in self.spaces for j in range(len(other.pages)) if other.owns(j)]
        if (space := self.a_space(n)) and (target := pick([other for other in others if other not in named], n)):
            for i in range(len(space.pages)):
                self.lead(space, i, *target)

    @precondition(lambda self: self.entries)
    @rule(n=NTH, which=NTH, how=st.sampled_from(["again", "twin", "doom", "lead", "close"]))
    def disturb(self, n: int, which: int, how: str) -> None:
        """Something that an entry names changes, or is soon what it was."""
        entry = pick(self.entries, n)
        if entry is None or (piece := pick(entry.pieces(), which)) is None or piece.home.closed or piece.twin.closed:
            return
        opened = [space for space in self.spaces if not space.closed]
        (home, i), (twin, j) = ((opened.index(space), (at, at)) for space, at in (piece[:2], piece[2:]))
        if how == "twin" and piece.twin.pages[piece.j] is None:
            self.map(twin, j, "host")
        elif how == "twin":
            self.retire(twin, j)
        elif how == "lead":
            self.alias(home, twin, which)
        elif how == "close":
            self.close_range(twin, j, True)
        else:
            if how == "doom":
                self.make_tensor(home, i)
            self.retire(home, i)
            self.map(home, i, "device")

    @precondition(lambda self: self.entries)
    @rule(which=st.lists(NTH, max_size=2))
    def withdraw(self, which: list[int]) -> None:
        keys = [entry.key for n in which if (entry := pick(self.entries, n))]
        self.device.withdraw([*keys, -1])
        self.entries = [entry for entry in self.entries if entry.key not in keys]

    @rule(which=st.lists(NTH, min_size=1, max_size=3), most=st.one_of(st.none(), st.integers(1, 6)))
    def take(self, which: list[int], most: int | None) -> None:
        self.settle()
        keys = {entry.key for n in which if (entry := pick(self.entries, n))}
        every = self.entries
        self.entries = [entry for entry in every if entry.key in keys]
        offered = self.offered(math.inf if most is None else most, self.theirs)
        self.entries = every
        taken = self.attempt(lambda: self.device.take([*keys], most))
        if not self.faulty:
            assert self.given == offered.given
            assert taken == offered.ready

    @rule(group=st.integers(0, GROUPS - 1), theirs=st.booleans(), leaves=st.booleans())
    def lease(self, group: int, theirs: bool, leaves: bool) -> None:
        """A forward of this thread, or of the other one, begins or ends."""
        held, native = self.theirs if theirs else self.mine, self.groups[group]
        if leaves and not held[group]:
            with pytest.raises(BallonetError, match="no lease"):
                self.other.does(native.leave) if theirs else native.leave()
            return
        work = native.leave if leaves else native.enter
        self.other.does(work) if theirs else work()
        held[group] += -1 if leaves else 1

    def not_under_a_lease(self, group: int, change: Callable[[], bool]) -> None:
        """No page changes where another thread reads."""
        if not self.faulty:
            self.lease(group, theirs=True, leaves=False)
            assert not change()
            self.lease(group, theirs=True, leaves=True)

    @rule()
    def other_yields(self) -> None:
        self.settle()
        numbers = self.device.snapshot()
        missing = self.lacking(numbers)
        offered = self.offered(missing, self.mine) if missing else Offered([], 0, 0)
        given = self.attempt(lambda: self.other.does(self.device.yield_pages))
        if self.faulty or self.wanted is None:
            self.wanted = None
            return
        assert (given, self.given) == (offered.ready, offered.given)
        if offered.ready >= missing or not offered.leased:
            self.wanted = 0

    def lacking(self, numbers: dict[str, Any]) -> int:
        """Pages that are missing for what is requested."""
        allowed = numbers["pages"]["free"] + numbers["budget"] // self.page
        return max(0, self.wanted + numbers["created"] - allowed) if self.wanted else 0

    # -- blocks -------------------------------------------------------------------------------------------------------

    @rule(
        nbytes=st.one_of(st.integers(1, 600), st.integers(1, 5 * 4096), st.sampled_from([4096, 8192, 65536, 2 << 16])),
        stream=st.integers(0, STREAMS),
    )
    def allocate(self, nbytes: int, stream: int) -> None:
        nbytes = min(nbytes, 24 * self.page)
        at_most = -(-nbytes // self.page)  # pages of its own would do
        fits = self.spills and at_most <= self.room().host and not self.faulty
        room = self.budget - self.must_stay()
        offered = self.offered(at_most - room, self.theirs)
        if fits and not self.given:
            self.settle()
        address = self.ask(lambda: self.device.allocate(nbytes, self.streams[stream]), at_most, known=False)
        if not self.faulty:
            assert [key for key, _ in self.given] == [key for key, _ in offered.given][: len(self.given)]
        if address is None:
            assert not fits
            return
        size = self.device.block_size(address)
        assert size == -(-nbytes // 512) * 512
        assert address % 512 == 0
        block = Block(address, nbytes, self.streams[stream], fresh(), size)
        # Whoever used these bytes before must be done, as far as this stream can know.
        self.device.note_use(address, nbytes, block.stream, True)
        write(address, block.value, nbytes)
        table = AddressTable(self.page)
        block.places = {number: table.place(number * self.page) or "" for number in self.seen(block)}
        # On the host only where the device has no pages, not even those of entries.
        assert self.faulty or at_most > room + offered.ready or {*block.places.values()} == {"device"}
        self.blocks.append(block)
        self.counts["allocations"] += 1
        self.counts["allocated_total"] += size
        for name, now in self.in_use().items():
            self.peaks[name] = max(self.peaks[name], now)

    def in_use(self) -> dict[str, int]:
        return {
            "live": sum(block.size for block in self.blocks),
            "requested": sum(block.nbytes for block in self.blocks),
        }

    @everywhere
    @rule(n=NTH, stream=st.integers(0, STREAMS), frees=st.booleans())
    def use_elsewhere(self, n: int, stream: int, frees: bool) -> None:
        """Work on another stream, ordered after that of the block's own, reads it."""
        block, other = pick(self.blocks, n), self.streams[stream]
        if block is None or other in (block.stream, *block.users):
            return
        event = outside.ctypes.c_void_p()
        with current_context() as it:
            it.ok("cuEventCreate", outside.ctypes.byref(event), 2)
            it.ok("cuEventRecord", event, block.stream)
            it.ok("cuStreamWaitEvent", other, event, 0)
            it.ok("cuEventDestroy", event)
        self.device.record_stream(block.address, other)
        self.device.record_stream(block.address + 512, other)  # no block begins there, or it is another one's
        self.device.note_use(block.address, block.nbytes, other, False)
        block.users.add(other)
        if frees:  # and what comes next is as large
            self.deallocate(n)
            self.allocate(block.nbytes, self.streams.index(block.stream))

    @rule(n=NTH)
    def deallocate(self, n: int) -> None:
        if (block := pick(self.blocks, n)) is None:
            return
        self.blocks.remove(block)
        assert holds(block.address, block.value, block.nbytes)
        self.device.deallocate(block.address)
        self.device.deallocate(block.address)  # now unknown, and ignored
        assert self.device.block_size(block.address) == 0
        self.counts["frees"] += 1
        self.counts["freed_total"] += block.size
        if not self.faulty and "host" in block.places.values():
            self.trim()  # the host's pages have gone with it

    # -- the whole ----------------------------------------------------------------------------------------------------

    @rule(over=st.integers(-8, 12), idle=st.integers(0, 4))
    def set_budget(self, over: int, idle: int = 0) -> None:
        """Sets a budget of so many pages more than must stay, or less, once so many more lie idle in the heap."""
        if 0 < idle <= self.budget - self.must_stay():
            self.allocate(idle * self.page, 0)
            self.deallocate(-1)
        pages = max(0, min(30, self.must_stay() + over))
        if (self.entries or idle) and not self.faulty:
            self.settle()
        before, stay = faults_fired(), self.must_stay()
        every, some = self.offered(math.inf, self.theirs), self.offered(stay - pages, self.theirs)
        immovable = stay - every.ready - every.leased - self.left_to_aliases()  # of those it is only known in the end
        meets = stay - some.ready <= pages
        lay_idle = self.device.idle
        try:
            self.attempt(lambda: (self.device.set_budget(pages * self.page), True))
        except BudgetInUse as refused:
            # An unmap that fails is made up for by the next reap.
            assert not meets or faults_fired() > before
            assert self.device.budget == self.budget * self.page
            said = refused.immovable
            assert self.faulty or said == max(immovable, 0) * self.page or immovable <= pages
        else:
            assert self.faulty or meets
            self.budget = pages
            assert physical() <= pages * self.page
            if idle and over >= 0 and not self.faulty:  # it goes after what is free, and no more of it than has to
                assert self.device.idle >= lay_idle or self.device.snapshot()["pages"]["free"] == 0
        if not self.faulty:
            assert self.given == (some.given if stay > pages >= immovable else [])

    @rule(pages=st.integers(1, 3), streams=st.lists(st.integers(0, STREAMS), max_size=3))
    def trim(self, pages: int = 0, streams: Sequence[int] = ()) -> None:
        """Once so many pages were freed on one stream after the other."""
        for stream in streams:
            self.allocate(pages * self.page, stream)
            self.deallocate(-1)
        if self.follow:
            self.settle()  # or more is mapped ahead behind its back
        before, activations = faults_fired(), self.core.pages()["activations"]
        freed = self.attempt(self.device.trim)
        if faults_fired() == before:
            assert self.device.snapshot()["created"] == self.must_stay()
            assert self.device.snapshot()["host_pages"] == self.must_stay("host")
            assert freed == (activations - self.core.pages()["activations"]) * self.page

    @everywhere
    @rule(wait=st.booleans())
    def reap(self, wait: bool) -> None:
        before = faults_fired()
        self.attempt(lambda: self.device.reap(wait=wait))
        if wait and faults_fired() == before:
            assert self.device.snapshot()["pages"]["pending_free"] == self.left_to_aliases()

    def left_to_aliases(self) -> int:
        """Device pages whose own range has given them up, and others show."""
        shown, owned = (
            {page for s in self.spaces for i, page in enumerate(s.pages) if page and s.alias[i] == alias}
            for alias in (True, False)
        )
        return sum(page.place == "device" for page in shown - owned)

    @everywhere
    @rule(stream=st.integers(1, STREAMS))
    def occupy(self, stream: int) -> None:
        self.core.occupy(self.streams[stream], 0.02)

    @precondition(lambda self: self.faulty)
    @rule(function=st.sampled_from(MAPPING + MAPPING + EVENTS + OTHERS), ahead=st.integers(1, 3))
    def fault(self, function: str, ahead: int) -> None:
        # Twice in a row a page is kept for the next time.
        if function not in ("cuMemRelease", "cuMemUnmap") or not pending(function):
            arm(function, ahead)

    # -- what must always be so ---------------------------------------------------------------------------------------

    def write_piece(self, space: Space, piece: int) -> None:
        page = space.pages[piece]
        assert page is not None
        write(space.range.address + piece * self.page, page.value, self.page)

    @invariant()
    def everything_holds(self) -> None:
        self.device.check()
        for _ in range(1000):
            before = self.state()
            snapshot, segments, available = self.device.snapshot(), self.device.segments(), self.device.available
            exist, table = physical(), AddressTable(self.page)
            if before == self.state():  # the device's thread has done nothing in between
                break
        else:
            raise AssertionError("the device's thread never comes to an end")
        assert sum(snapshot["pages"].values()) == snapshot["created"]
        assert exist == snapshot["created"] * self.page
        assert physical("host") == snapshot["host_pages"] * self.page
        assert physical("peer") == snapshot["peer_pages"] * self.page
        assert snapshot["created"] <= self.budget
        assert self.device.budget == self.budget * self.page
        assert available == snapshot["pages"]["free"] + self.budget - snapshot["created"]
        assert snapshot["reclaimed"] == self.reclaimed
        assert snapshot["kept"] + snapshot["ahead"] <= snapshot["pages"]["free"]
        if all(space.range.owner != "activations" for space in self.spaces):  # those are thought to be the heap's
            assert sum(nbytes for _, nbytes, *_, owner, _ in segments if owner != "spilled") == exist
            assert self.device.idle <= snapshot["pages"]["activations"] - self.under_blocks("device")
        heap, now = snapshot["heap"], self.in_use()
        assert {name: heap[name] for name in now} == now
        assert {f"{name}_peak": heap[f"{name}_peak"] for name in now} == {
            f"{name}_peak": self.peaks[name] for name in now
        }
        assert {name: heap[name] for name in COUNTED} == {name: self.counts[name] for name in COUNTED}
        assert heap["blocks"] == len(self.blocks)
        for group, native in enumerate(self.groups):
            assert native.leases == self.mine[group] + self.theirs[group]
            assert native.unpinned == self.unpinned[group]
        self.list_holds()
        self.addresses_show_what_they_should(table, before)
        for space in self.spaces:
            for i, page in enumerate(space.pages):
                if page is not None:
                    assert holds(space.range.address + i * self.page, page.value, self.page)
        for block in self.blocks:
            assert holds(block.address, block.value, block.nbytes)

    def list_holds(self) -> None:
        """An entry leaves the list once its pages are not what they were, and not before."""
        shown, room = self.shown(), Room(1, 1)
        listed = [
            entry.key
            for entry in self.entries
            if (any(self.divided(entry, entry.limit, room, shown)) if entry.limit is not None else not entry.void())
        ]
        published = self.device.published
        if published != listed and not self.faulty:
            self.settle()  # what showed a page before may still be retiring
            published = self.device.published
        # What a fault has undone has changed, too.
        assert {*published} <= {*listed} if self.faulty else published == listed
        if self.faulty:
            return
        assert self.core.copied() == {**self.copied}
        if self.wanted is not None:
            lacking = self.lacking(self.device.snapshot())
            assert self.device.page_request == lacking
        if self.device.page_request == 0:
            self.wanted = 0

    def state(self) -> State:
        leads = [backings(space.range) for space in self.spaces]
        pages = [[space.range.page(i) for i in range(len(space.pages))] for space in self.spaces]
        return State(self.core.created(), self.device.snapshot()["driver_calls"]["cuMemUnmap"], leads, pages)

    def addresses_show_what_they_should(self, table: AddressTable, state: State) -> None:
        """Every page that is owned lies behind one owner's addresses only, and what is not mapped is out of reach."""
        owner_of: dict[
            tuple[str | None, int], object
        ] = {}  # place, offset in its memfd -> page of the model or address
        for number, space in enumerate(self.spaces):
            for i, page in enumerate(space.pages):
                if page is None and space.closed:
                    continue  # the addresses may be someone else's, or the system's
                place, access, offset = table.behind(space.range.address + i * self.page)
                if page is not None:
                    assert (place, access) == (page.place, "rw-s")
                    assert state.backings[number][i] == ("alias" if space.alias[i] else page.place)
                    assert owner_of.setdefault((place, offset), page) is page
                    continue
                backing = state.backings[number][i]
                if backing == "kept":
                    assert (place, access) == ("device", "rw-s")
                    assert owner_of.setdefault((place, offset), (space, i)) == (space, i)
                elif backing == "none":
                    assert (place, access) == (None, "---p")
                    assert state.pages[number][i] == -1
                else:
                    assert backing == "pending_free"
        for block in self.blocks:
            for number in self.seen(block):
                place, access, offset = table.behind(number * self.page)
                assert (place, access) == (block.places[number], "rw-s")
                assert owner_of.setdefault((place, offset), number) == number

    def teardown(self) -> None:
        disarm()
        if not hasattr(self, "core"):
            return
        self.device.publish([])
        for block in self.blocks:
            self.device.deallocate(block.address)
        for space in self.spaces:
            space.tensors.clear()
            space.range.close()
        self.spaces.clear()
        self.entries.clear()
        self.core.finish()
        self.device.check()
        self.other.close()
        self.device.close()
        assert physical() == physical("host") == physical("peer") == 0
        assert self.faulty or self.addresses() <= self.reserved

    def addresses(self) -> int:
        """Ranges of addresses that the driver has not taken back."""
        made = calls()
        return made["cuMemAddressReserve"] - made["cuMemAddressFree"]


class AddressTable:
    """/proc/self/maps, read once."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.lines = outside.maps(0, 2**48, lambda line: "memfd:ballonet" in line or "---p 00000000 00:00 0" in line)

    def behind(self, address: int) -> tuple[str | None, str, int]:
        for one in self.lines:
            if one.begin <= address and address + self.page <= one.end:
                return one.place, one.access, one.offset + address - one.begin
        raise AssertionError(f"no single map covers {address:#x}")

    def place(self, address: int) -> str | None:
        """The place of the page there; None where there is none."""
        return next((one.place for one in self.lines if one.begin <= address < one.end), None)


@pytest.mark.parametrize(
    ("page", "about", "examples"),
    [(4096, "faults", 25), (4096, "calm", 25), (4096, "giving", 50), (65536, "faults", 12), (65536, "calm", 12)],
)
def test_anything_in_any_order(page: int, about: str, examples: int) -> None:
    """With larger pages the heap packs otherwise; what entries give does not depend on that."""
    assert driver().is_standin
    machine = type("About", (Machine,), {"page": page, "faulty": about == "faults", "giving": about == "giving"})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, examples * int(os.environ.get("BALLONET_EXAMPLES", "25")) // 25),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
