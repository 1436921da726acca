"""The index of a prefix cache: the blocks of tokens that are stored, their owners, and which go first. Pure.

A *block* is a number of tokens. Its key stands for all tokens from the first to its last (`chain`), so that blocks
are the nodes of a forest, and the stored part of a prompt is a leading run of its keys. A block leaves after those that
hang on it: what is stored can always be reached.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush

from .worth import Odds, Policy


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
    __slots__ = ("children", "depth", "key", "order", "owner", "parent", "stored", "worth")

    def __init__(self, key: Hashable, owner: Hashable, parent: _Node | None, order: int) -> None:
        self.key = key
        self.owner = owner
        self.parent = parent
        self.children: dict[Hashable, _Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.order = order  # of the blocks that were ever stored: equals go oldest first
        self.worth = 0.0
        self.stored = True


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
        self._policy = policy or Odds()
        self._nodes: dict[Hashable, _Node] = {}
        self._roots: dict[Hashable, _Node] = {}
        self._pins: dict[Hashable, int] = {}  # by key: it outlives the block
        self._heap: list[tuple[float, int, int, _Node]] = []  # see Note [Lazy heap]
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
            node.worth = self._policy.used(key)
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
                node.worth = self._policy.stored(key, behind, last=ended and n == len(keys))
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
        spared = []
        while self._heap and len(gone) < count:
            entry = heappop(self._heap)
            node = entry[-1]
            if not self._candidate(entry):
                continue
            if only is not None and not only(node.owner, node.key):
                spared.append(entry)
                continue
            gone.append((node.owner, node.key))
            self._drop(node, evicted=True)
        for entry in spared:
            heappush(self._heap, entry)
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

    # Note [Lazy heap]
    #   In the heap is every block that may be evicted, under what it is worth. When that changes another entry is
    #   added, and the old one skipped when it comes up: its worth is not the block's any more. When there are more than
    #   twice as many entries as blocks the heap is made anew, which costs each operation a constant.

    def _offer(self, node: _Node) -> None:
        if node.children or node.key in self._pins:
            return
        heappush(self._heap, (node.worth, -node.depth, node.order, node))
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [entry for entry in dict.fromkeys(self._heap) if self._candidate(entry)]
            heapify(self._heap)

    def _candidate(self, entry: tuple[float, int, int, _Node]) -> bool:
        worth, _, _, node = entry
        return node.stored and node.worth == worth and not node.children and node.key not in self._pins
