"""The index of a prefix cache: the blocks of tokens that are stored, their owners, what each is worth, and which go
first, from memory and from a folder of files. Pure: no clock, no chance.

A *block* is a number of tokens. Its key stands for all tokens from the first to its last (`chain`), so that blocks
are the nodes of a forest, and the stored part of a prompt is a leading run of its keys. A block leaves after those that
hang on it: what is stored can always be reached.

A file has a run of blocks, which is of no use without those before it, so its uses count for them as well: what goes
first is the file whose last use, and that of all that continue it, is the longest ago, and of equals the one furthest
from the beginning of its prompt. So nothing that is left continues what is gone.

Note [Density]
    The block to evict is the one that brings the fewest hits for the room it takes from now on: LHD (Beckmann, Chen and
    Cidon, NSDI 2018). Blocks are told apart by *kind*: how often they were used; and those that were used once, by
    whether they ended their request, and whether their request left a path that several had gone before (a system
    prompt), or that of a single one. For each kind it is counted at which age blocks returned, in octaves. The density
    of a block of this age is

        max over ages to come of  hits until then / ages lived until then,

    which also knows that what is read in rounds returns late and surely. Where nothing is known a kind is taken to
    return as all do. Of one kind the block that was used the longest ago goes first, so a heap for each kind suffices.

    Counts are of the past, and blocks of one request are counted as if they came by chance: where all kinds return
    alike what was learned is noise, and worse than the least recently used block. So the two are matched: where they
    differ it is noted which of the two returns first, and what was learned decides only while it is right clearly more
    often. That is learning by regret, as in LeCaR (Vietri et al., HotStorage 2018).

    Time is counted in blocks that were stored, as those need the room. Blocks that have not returned yet count as not
    returned: this underestimates all kinds alike.

Note [Gone]
    A policy that only sees what it kept learns that it was right. So keys that were evicted are remembered for
    a while, a few for each that is stored: one that comes back counts as a return, and goes on with its uses.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import log2
from typing import Final, Protocol

from .tuning import DEFAULT


class Policy(Protocol):
    """An eviction policy: each event of a block returns its kind, and when that was. Of one kind blocks go by time."""

    def stored(self, key: Hashable, behind: Hashable | None, *, last: bool) -> tuple[Hashable, int]:
        """Notes a new block. `behind`: the last block of its request that is not new; `last`: is it the last of its
        request?"""
        ...

    def used(self, key: Hashable) -> tuple[Hashable, int]:
        """Notes that a request begins with the block."""
        ...

    def choose(self, oldest: Sequence[Hashable]) -> int:
        """Returns which block is evicted, as an index. `oldest`: one of each kind, least recently used first."""
        ...

    def dropped(self, key: Hashable, *, evicted: bool) -> None:
        """Notes that a block is stored no more: `evicted` for room, or what it stood for is no longer true."""
        ...


class Recency:
    """Evicts the least recently used blocks."""

    def __init__(self) -> None:
        self._clock = 0

    def stored(self, key: Hashable, behind: Hashable | None, *, last: bool) -> tuple[Hashable, int]:
        return self.used(key)

    def used(self, key: Hashable) -> tuple[Hashable, int]:
        self._clock += 1
        return None, self._clock

    def choose(self, oldest: Sequence[Hashable]) -> int:
        return 0

    def dropped(self, key: Hashable, *, evicted: bool) -> None:
        pass


class _Past:
    """The past of a block: how often it was used, when last, and as which kind; the block that it is matched with, and
    whether this one was kept by what was learned."""

    __slots__ = ("at", "kept", "kind", "match", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.at = 0
        self.kind: Hashable = None
        self.match: _Past | None = None
        self.kept = False

    def end_match(self) -> None:
        if (other := self.match) is not None:
            other.match = self.match = None


class Ages:
    """The ages at which blocks of a kind returned, and uses, whether followed by another or not. `octaves`: of ages;
    what is older counts for the last."""

    def __init__(self, octaves: int) -> None:
        self.uses = 0.0
        self.returned = [0.0] * octaves
        self._densities: list[float] = []

    def halve(self) -> None:
        self.uses /= 2
        self.returned = [count / 2 for count in self.returned]

    def learn(self, every: Ages, prior: float) -> None:
        """Works out densities, with `prior` uses that returned as those of `every` kind."""
        share = prior / (every.uses + prior)
        left, steps = self.uses + prior, []
        for octave, (mine, all_) in enumerate(zip(self.returned, every.returned, strict=True)):
            hits = mine + share * all_
            steps.append((hits, max(left - hits / 2, 1e-9) * 2 ** max(octave, 1)))
            left -= hits
        self._densities = densities(steps)

    def density(self, age: int) -> float:
        """Hits to come for each block and time, of a block of this age. Between middles of octaves on a line."""
        whole, part = divmod(max(0.0, log2(max(age, 1)) - 0.5), 1)
        low = min(int(whole), len(self._densities) - 2)
        return self._densities[low] * (1 - part) + self._densities[low + 1] * part


def densities(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Returns for each step the largest (hits / time) of it and any number of those that follow it. Steps: (hits, time
    above 0). Takes time in proportion to their number."""
    best, runs = [], list[tuple[float, float]]()
    for hits, time in reversed(steps):
        while runs and runs[-1][0] * time > hits * runs[-1][1]:
            more, longer = runs.pop()
            hits, time = hits + more, time + longer
        runs.append((hits, time))
        best.append(hits / time)
    return best[::-1]


# All chosen on prompts that were recorded and made: docs/measuring.md, hit rates.
_REMEMBERED: Final = 4  # keys that are gone, for each that is stored
_PRIOR: Final = 16.0  # uses that every kind of block starts with, which returned as those of all kinds
_OCTAVES: Final = 48  # of ages, in blocks stored, that are told apart: more than any process stores
_SHARED: Final = 3  # uses from which on another request had a block than this one and the one that stored it
_OFTEN: Final = 8  # uses from which on they are not told apart
_AGAIN: Final = 64  # blocks stored until densities are worked out again
_CLEARLY: Final = 1.3  # what was learned decides while it was right so many times as often as wrong
_MATCHES: Final = 4000  # after which those before weigh half


class Density:
    """Evicts the blocks that will bring the fewest hits for their room. See Note [Density]."""

    def __init__(self, doubt: float = DEFAULT.prefixes.doubt, learned: int = 2**16) -> None:
        """`doubt`: so many times more than `_CLEARLY` that what was learned has to be right; `learned`: returns after
        which what was counted before weighs half."""
        self._doubt = doubt
        self._learned = learned
        self._clock = self._due = 0
        self._stored: dict[Hashable, _Past] = {}
        self._gone: OrderedDict[Hashable, _Past] = OrderedDict()
        self._kinds: dict[Hashable, Ages] = {}
        self._every = Ages(_OCTAVES)
        self._right = self._wrong = 0.0  # what was learned, in matches with the least recently used

    def stored(self, key: Hashable, behind: Hashable | None, *, last: bool) -> tuple[Hashable, int]:
        self._clock += 1
        past = self._gone.pop(key, None) or _Past()
        self._stored[key] = past
        path = self._stored.get(behind)
        return self._use(past, (last, path is not None and path.uses >= _SHARED))

    def used(self, key: Hashable) -> tuple[Hashable, int]:
        return self._use(self._stored[key], None)

    def choose(self, oldest: Sequence[Hashable]) -> int:
        if len(oldest) == 1:
            return 0
        pasts = [self._stored[key] for key in oldest]
        if self._clock >= self._due:
            self._due = self._clock + _AGAIN
            for kind in self._kinds.values():
                kind.learn(self._every, _PRIOR)
        ages = [self._kinds[past.kind].density(self._clock - past.at) for past in pasts]
        least = min(range(len(ages)), key=ages.__getitem__)
        if least and pasts[0].match is None and pasts[least].match is None:
            pasts[0].match, pasts[least].match = pasts[least], pasts[0]
            pasts[0].kept, pasts[least].kept = True, False
        return least if self._right >= _CLEARLY * self._wrong + self._doubt else 0

    def dropped(self, key: Hashable, *, evicted: bool) -> None:
        past = self._stored.pop(key)
        if evicted:
            self._gone[key] = past
        else:
            past.end_match()
        while len(self._gone) > _REMEMBERED * len(self._stored):
            self._gone.popitem(last=False)[1].end_match()

    def _use(self, past: _Past, first: Hashable) -> tuple[Hashable, int]:
        """Notes a use. `first`: its kind, if this is its first use."""
        if past.uses:
            self._return(past)
        past.uses += 1
        past.at = self._clock
        past.kind = min(past.uses, _OFTEN) if past.uses > 1 else first
        if past.kind not in self._kinds:
            self._kinds[past.kind] = Ages(_OCTAVES)
            self._due = 0
        self._kinds[past.kind].uses += 1
        self._every.uses += 1
        return past.kind, past.at

    def _return(self, past: _Past) -> None:
        octave = min(max(self._clock - past.at, 1).bit_length(), _OCTAVES) - 1
        for kind in (self._kinds[past.kind], self._every):
            kind.returned[octave] += 1
        if sum(self._every.returned) >= self._learned:
            for kind in (self._every, *self._kinds.values()):
                kind.halve()
        if past.match is not None:
            self._right += past.kept
            self._wrong += not past.kept
            past.end_match()
            if self._right + self._wrong > _MATCHES:
                self._right, self._wrong = self._right / 2, self._wrong / 2


def chain(ids: Sequence[int], block: int, salt: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns the keys of the full blocks of `ids`: 16 bytes each, of the block, all before it and `salt`, which says
    what else the keys and values depend on. `known`: those of its first blocks, which are not worked out again.
    ValueError for a block below 1."""
    if block < 1:
        raise ValueError(f"a block has at least one token, not {block}")
    content = array("q", ids[len(known) * block :])
    if sys.byteorder == "big":
        content.byteswap()
    data, size = content.tobytes(), 8 * block
    keys = list(known)
    key = keys[-1] if keys else _digest(salt)
    for start in range(0, len(data) - size + 1, size):
        key = _digest(key + data[start : start + size])
        keys.append(key)
    return keys


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


@dataclass(slots=True)
class Hits:
    """Counts: requests, their full blocks, and those of them that were stored."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0


class _Node:
    __slots__ = ("children", "depth", "key", "kind", "order", "owner", "parent", "stored", "used")

    def __init__(self, key: Hashable, owner: Hashable, parent: _Node | None, order: int) -> None:
        self.key = key
        self.owner = owner
        self.parent = parent
        self.children: dict[Hashable, _Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.order = order  # of the blocks that were ever stored: equals go oldest first
        self.kind: Hashable = None
        self.used = 0
        self.stored = True


_Entry = tuple[int, int, int, _Node]  # last use, - depth, order, block


class Index:
    """The blocks that are stored. Not for several threads at once.

    `capacity`: blocks, None for any number; `excess` says how many are above it, and nothing is evicted unasked. A
    block belongs to whom it was inserted for. Operations take O(log n) per block.
    """

    def __init__(self, capacity: int | None = None, policy: Policy | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"a capacity is not below 0, as {capacity} is")
        self.capacity = capacity
        self.hits = Hits()
        self._policy = policy or Density()
        self._nodes: dict[Hashable, _Node] = {}
        self._roots: dict[Hashable, _Node] = {}
        self._pins: dict[Hashable, int] = {}  # by key: it outlives the block
        self._heaps: dict[Hashable, list[_Entry]] = {}  # by kind, see Note [Lazy heaps]
        self._entries = 0  # in all of them
        self._ever = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._nodes)

    def owner(self, key: Hashable) -> Hashable:
        """Returns the owner of a block. KeyError where it is not stored."""
        return self._nodes[key].owner

    def after(self, key: Hashable | None) -> list[tuple[Hashable, Hashable]]:
        """(owner, key) of the blocks that hang on this one, of None those that hang on none. KeyError where it is not
        stored."""
        nodes = self._roots if key is None else self._nodes[key].children
        return [(node.owner, node.key) for node in nodes.values()]

    def peek(self, keys: Sequence[Hashable]) -> int:
        """Returns how many of the first keys are stored. Changes nothing."""
        return next((n for n, key in enumerate(keys) if key not in self._nodes), len(keys))

    def match(self, keys: Sequence[Hashable]) -> int:
        """Uses the stored blocks of a request, as `use`, and counts them in `hits`."""
        count = self.use(keys)
        self.hits.requests += 1
        self.hits.blocks += len(keys)
        self.hits.hit_blocks += count
        return count

    def use(self, keys: Sequence[Hashable]) -> int:
        """Notes that a request uses the first keys that are stored. Returns how many."""
        count = self.peek(keys)
        for key in keys[:count]:
            node = self._nodes[key]
            node.kind, node.used = self._policy.used(key)
            self._offer(node)
        return count

    def insert(self, keys: Sequence[Hashable], owner: Hashable, *, ended: bool = True) -> list[Hashable]:
        """Stores the blocks of a sequence, from its first, or one that is stored; returns those that were not there,
        which are `owner`'s now. Evicts nothing, and does not count as a use of those that were there. `ended`: is the
        last block the last of its request?"""
        new: list[Hashable] = []
        parent: _Node | None = None
        behind: Hashable | None = None
        for n, key in enumerate(keys, 1):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(key, owner, parent, self._ever)
                self._ever += 1
                (self._roots if parent is None else parent.children)[key] = node
                node.kind, node.used = self._policy.stored(key, behind, last=ended and n == len(keys))
                new.append(key)
            elif not new:
                behind = key
            parent = node
        for key in new:
            self._offer(self._nodes[key])
        return new

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Keeps blocks from being evicted until each is unpinned as often. Pins are of keys, stored or not."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Takes back one pin of each. ValueError for a key that is not pinned."""
        for key in keys:
            if key not in self._pins:
                raise ValueError(f"{key!r} is not pinned")
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if key in self._nodes:
                    self._offer(self._nodes[key])

    def excess(self) -> int:
        """Blocks above the capacity."""
        return 0 if self.capacity is None else max(0, len(self._nodes) - self.capacity)

    def evict(
        self, count: int, only: Callable[[Hashable, Hashable], bool] | None = None
    ) -> list[tuple[Hashable, Hashable]]:
        """Drops the `count` blocks that are worth least: (owner, key) of each, in order. `only`: which may be.

        Never one that is pinned, nor one that another hangs on; so there may be fewer.
        """
        gone: list[tuple[Hashable, Hashable]] = []
        spared: list[_Entry] = []
        while len(gone) < count and (oldest := self._oldest(only, spared)):
            node = oldest[self._policy.choose([entry[-1].key for entry in oldest])][-1]
            gone.append((node.owner, node.key))
            self._drop(node, evicted=True)
        for entry in spared:
            self._offer(entry[-1])
        return gone

    def forget(self, keys: Iterable[Hashable]) -> list[tuple[Hashable, Hashable]]:
        """Drops blocks, pinned or not, after all that hang on them: (owner, key) of each. For blocks that no longer
        hold what their keys say."""
        gone: list[tuple[Hashable, Hashable]] = []
        for key in keys:
            if key not in self._nodes:
                continue
            below = [self._nodes[key]]
            for node in below:  # grows
                below.extend(node.children.values())
            for node in reversed(below):
                gone.append((node.owner, node.key))
                self._drop(node, evicted=False)
        return gone

    def clear(self) -> None:
        """Drops all blocks, pinned or not. Pins and `hits` stay."""
        self.forget(list(self._roots))

    def _drop(self, node: _Node, *, evicted: bool) -> None:
        node.stored = False
        del self._nodes[node.key]
        self._policy.dropped(node.key, evicted=evicted)
        if node.parent is None:
            del self._roots[node.key]
        else:
            del node.parent.children[node.key]
            self._offer(node.parent)

    # Note [Lazy heaps]
    #   In the heap of its kind is every block that may be evicted, under its last use. When that changes another entry
    #   is added, and the old one skipped when it comes up: it is not the block's any more. When there are more than
    #   twice as many entries as blocks the heaps are made anew, which costs each operation a constant.

    def _offer(self, node: _Node) -> None:
        if node.children or node.key in self._pins:
            return
        heappush(self._heaps.setdefault(node.kind, []), (node.used, -node.depth, node.order, node))
        self._entries += 1
        if self._entries > 2 * len(self._nodes) + 64:
            for kind, heap in self._heaps.items():
                self._heaps[kind] = [entry for entry in dict.fromkeys(heap) if self._candidate(kind, entry)]
                heapify(self._heaps[kind])
            self._entries = sum(map(len, self._heaps.values()))

    def _oldest(self, only: Callable[[Hashable, Hashable], bool] | None, spared: list[_Entry]) -> list[_Entry]:
        """Returns the oldest block of each kind that may be evicted, oldest first. Those that `only` does not allow are
        taken out of their heaps into `spared`."""
        oldest = []
        for kind, heap in self._heaps.items():
            while heap:
                entry = heap[0]
                candidate = self._candidate(kind, entry)
                if candidate and (only is None or only(entry[-1].owner, entry[-1].key)):
                    oldest.append(entry)
                    break
                heappop(heap)
                self._entries -= 1
                if candidate:
                    spared.append(entry)
        return sorted(oldest)

    def _candidate(self, kind: Hashable, entry: _Entry) -> bool:
        used, _, _, node = entry
        current = node.stored and (node.kind, node.used) == (kind, used)
        return current and not node.children and node.key not in self._pins


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A run of blocks of a chain. `keys`: of the blocks, in order; `after`: of the block before them, empty where they
    begin the prompt; `salt`: what the keys are for (model, dtype, adapter, ...)."""

    salt: bytes
    after: bytes
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file. `used`: its last use, ns. `part`: None where its content is not known here."""

    name: str
    inode: int
    nbytes: int
    used: int
    part: StoredPart | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds for tokens of a prompt: to read them from files (`disk`) and copy them to the device (`link`), or to
    `compute` them. None where not measured."""

    disk: float | None
    link: float | None
    compute: float | None

    @property
    def worth(self) -> bool:
        """Is reading worth it? True also where either is not known."""
        return self.disk is None or self.compute is None or self.disk + (self.link or 0.0) <= self.compute


def reading(nbytes: int, tokens: int, *, disk: float | None, link: float | None, per_token: float | None) -> Reading:
    """Returns the seconds of reading and of computing files of so many bytes with so many tokens. `disk`, `link`: bytes
    per second; `per_token`: seconds in which one is computed, in a prefill of many."""
    return Reading(
        None if disk is None else nbytes / disk,
        None if link is None else nbytes / link,
        None if per_token is None else tokens * per_token,
    )


def before(files: Iterable[Stored], part: StoredPart) -> list[Stored]:
    """Iterates over the files that a run continues, as far as they are there: the one just before it, the one before
    that, ..."""
    return _before(_by_key(files), part)


def leaving(files: Collection[Stored], excess: int, kept: Collection[str] = ()) -> list[Stored] | None:
    """Returns the files to remove, in this order, so that so many bytes go: none that is `kept` (by name). None where
    that is not possible."""
    holders = _by_key(files)
    used = {file.name: file.used for file in files}
    depth = dict.fromkeys(used, 0)
    for file in files:
        continued = _before(holders, file.part) if file.part is not None else []
        depth[file.name] = len(continued)
        for other in continued:
            used[other.name] = max(used[other.name], file.used)
    gone = []
    for file in sorted(files, key=lambda file: (used[file.name], -depth[file.name], file.name)):
        if excess > 0 and file.name not in kept:
            gone.append(file)
            excess -= file.nbytes
    return gone if excess <= 0 else None


def _by_key(files: Iterable[Stored]) -> dict[tuple[bytes, bytes], Stored]:
    return {(file.part.salt, key): file for file in files if file.part is not None for key in file.part.keys}


def _before(holders: Mapping[tuple[bytes, bytes], Stored], part: StoredPart) -> list[Stored]:
    chain: list[Stored] = []
    reached = holders.get((part.salt, part.after))
    while reached is not None and reached.part is not None and reached not in chain:
        chain.append(reached)
        reached = holders.get((reached.part.salt, reached.part.after))
    return chain
