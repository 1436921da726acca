"""Models that lend each other KV pages: in which units, and how many (SwiftCache §3.4, §3.5), with the books of what
each has reserved, lent and borrowed (`Lending`). manager/reclaim.py moves the pages. Pure.

Words
    worker    a model that lends; it comes first in what it needs for itself
    master    a model that borrows
    block     what a model's KV grows by: of Eq. 6 and 7 in bytes, of a pool in pages, one for each of its ranges
    unit      the minimum elastic unit: what changes hands is a multiple of it, and whole blocks on either side
    reserve   pages that a model has for itself, as many as it used at once not long ago, in whole blocks
    borrowed  what a model holds beyond its reserve

Note [Errata]
    Sizes are in bytes where Eq. 6-8 count elements: two models may have different types. In Algorithm 1 a worker takes
    back what it lacks rounded up to units, and lends what it can spare rounded down. It spares what no moment of the
    last while needed: the paper takes the longest request, but requests run side by side, and what counts is the most
    blocks that were in use at once.

Note [Units of a pool]
    Two models with 32 and 36 ranges grow by 32 and by 36 pages, whose least common multiple is 288: with pages of 8 MiB
    more than 2 GiB. The paper needs it, as what is not whole blocks of either model is lost. In one pool it is free,
    for either, or for a third. So where the unit would be more than a part of the pool, it is a block of the worker's,
    and the master gives whole blocks of its own that are as much or more.

Note [Due]
    A reserve is a number of pages, no particular ones. As long as free pages make every reserve whole, any model may
    have more. When a worker wants its pages and they are not free, models that hold more than their reserves give back
    what is missing, and no more than they borrowed.

Note [Reserves]
    There is one pool, and pages are of one size: what changes hands changes its owner, and no byte is moved. So a model
    has no pages of its own, but a reserve: what its caches had in use at one time of the last `window` seconds, in
    whole units, and at least the part of its floor that weights do not take. A reserve is scaled up when a cache is
    about to grow, before its pages are asked for, and scaled down at most once a second, at a `look`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of one `size` for both models: `worker` blocks of the one, and `master` blocks of the other, which may be
    more where it is capped."""

    size: int
    worker: int
    master: int


def unit(worker: int, master: int, page: int = 1) -> Unit:
    """Returns the smallest unit that is whole blocks of either model, and whole pages (Eq. 8 and 9). `worker`,
    `master`: their blocks, in bytes, or with a `page` of 1 in pages. ValueError."""
    if worker < 1 or master < 1 or page < 1:
        raise ValueError("a block and a page have at least one byte")
    size = lcm(worker, master, page)
    return Unit(size, size // worker, size // master)


def unit_within(worker: int, master: int, most: int) -> Unit:
    """Returns `unit` in pages, or where that would be more than `most` one block of the worker's, and whole blocks of
    the master's that are as much or more. See Note [Units of a pool]. ValueError."""
    exact = unit(worker, master)
    return exact if exact.size <= most else Unit(worker, 1, -(-worker // master))


def resized(reserve: int, block: int, needed: int, unit: Unit) -> int:
    """Returns the reserve of a worker, in pages as its block, once it has taken back or lent whole units (Algorithm 1):
    to have at least what it needs it takes back more rather than less, and lends less rather than more."""
    blocks, wanted = -(-reserve // block), -(-needed // block)
    lends = (blocks - wanted) // unit.worker  # below 0: takes back; rounded down either way
    return (blocks - lends * unit.worker) * block


@dataclass(frozen=True, slots=True)
class Account:
    """The account of model `number`, in pages: its `block`, its `reserve`, and the device pages that it has, `held`.
    `priority`: those with the lowest give first."""

    number: int
    block: int
    reserve: int
    held: int
    priority: int = 0

    @property
    def borrowed(self) -> int:
        return max(0, self.held - self.reserve)

    @property
    def lacking(self) -> int:
        """The pages that it lacks of its reserve."""
        return max(0, self.reserve - self.held)


def master_of(worker: Account, accounts: Sequence[Account]) -> Account | None:
    """Returns the other model that borrows most, or would, as it has most; None where there is no other."""
    others = [account for account in accounts if account.number != worker.number]
    return max(others, key=lambda other: (other.borrowed, other.held, -other.number), default=None)


def due(accounts: Sequence[Account], free: int, most: int) -> dict[int, int]:
    """Returns the pages that each model has to give back, so that with the `free` ones every reserve is whole, as far
    as they are borrowed. Models with the lowest priority give first, of equals the one that borrows most; in units
    shared with the one that lacks most, of `most` pages at most. See Note [Due]."""
    missing = sum(account.lacking for account in accounts) - free
    dues: dict[int, int] = {}
    if missing <= 0:
        return dues
    worker = max(accounts, key=lambda account: (account.lacking, -account.number))
    for master in sorted(accounts, key=lambda account: (account.priority, -account.borrowed, account.number)):
        if missing > 0 and master.borrowed:
            size = unit_within(worker.block, master.block, most)
            units = -(-missing // size.size)
            dues[master.number] = min(units * size.master * master.block, master.borrowed)
            missing -= dues[master.number]
    return dues


class Window:
    """The most blocks in use at one time of the last `seconds`. Times do not go back. O(1) amortized."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._falling: deque[tuple[float, int]] = deque([(0.0, 0)])  # (until when, blocks): most first, each less

    def use(self, now: float, blocks: int) -> None:
        """Notes that from `now` on so many blocks are in use, of all requests together."""
        self._until(now)
        while self._falling and self._falling[-1][1] <= blocks:
            self._falling.pop()
        self._falling.append((now, blocks))

    def most(self, now: float) -> int:
        self._until(now)
        return self._falling[0][1]

    def _until(self, now: float) -> None:
        """Moves the window to `now`, with the blocks in use until then."""
        self._falling[-1] = (now, self._falling[-1][1])
        while self._falling[0][0] < now - self.seconds:
            self._falling.popleft()


@dataclass(slots=True)
class Use:
    """Pages of one model: `used` by caches in use, or about to be; `held` by all of its caches, on the device; `block`:
    the step it grows by, 0 while it has none; `floor`: what its KV keeps."""

    number: int
    name: str
    priority: int = 0
    floor: int = 0
    block: int = 0
    used: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Lent:
    """Pages that one model has lent and borrowed. `reserve`: its own; `borrowed`: held beyond that; `lent`: former
    reserve that is for others now; `unit`: the multiple in which pages change hands."""

    reserve: int = 0
    borrowed: int = 0
    lent: int = 0
    unit: int = 1


@dataclass(slots=True)
class _Book:
    window: Window
    reserve: int = 0
    lent: int = 0
    unit: int = 1
    block: int = 1  # that it grew by last


# Seconds between looks whether a reserve can be spared: the window is a minute, so a second is soon enough. Chosen.
_CHECK: Final = 1.0
# A unit is no more than 1/8 of the pool: the least common multiple of two models can be more than all of it. See Note
# [Units of a pool]. Chosen.
PART: Final = 8


class Lending:
    """The books of all models, by number. Not thread-safe: callers hold the manager's lock."""

    def __init__(self, window: float) -> None:
        """`window`: seconds."""
        self._window = window
        self._books: dict[int, _Book] = {}
        self.due_at = _CHECK  # when it is time to look what can be spared

    def covers(self, use: Use, now: float) -> bool:
        """Notes what the model uses. Is it within the reserve?"""
        book = self._book(use.number)
        book.window.use(now, use.used)
        return use.used <= book.reserve

    def look(self, uses: Sequence[Use], now: float, total: int) -> list[tuple[Use, int]]:
        """Updates reserves to what is used, in a pool of `total` pages. Returns the models that took back pages they
        had lent, with how many; negative: newly lent."""
        self.due_at = now + _CHECK
        self._books = {use.number: self._book(use.number) for use in uses}
        for use in uses:
            self._books[use.number].block = use.block or self._books[use.number].block
        accounts = self.accounts(uses)
        changes = []
        for use, account in zip(uses, accounts, strict=True):
            book, master = self._books[use.number], master_of(account, accounts)
            book.window.use(now, use.used)
            size = unit_within(book.block, book.block if master is None else master.block, self._largest(total))
            book.unit = size.size
            before, needed = book.reserve, max(book.window.most(now), use.floor)
            book.reserve = resized(before, book.block, needed, size)
            change = max(-book.lent, before - book.reserve)
            book.lent += change
            if change:
                changes.append((use, -change))
        return changes

    def accounts(self, uses: Sequence[Use]) -> list[Account]:
        """The books as lending.py takes them."""
        books = [(use, self._book(use.number)) for use in uses]
        return [Account(use.number, book.block, book.reserve, use.held, use.priority) for use, book in books]

    def due(self, uses: Sequence[Use], free: int, total: int) -> dict[int, int]:
        """Pages that each model has to give back, so that every reserve is whole."""
        return due(self.accounts(uses), free, self._largest(total))

    def borrowed(self, uses: Sequence[Use]) -> int:
        """Pages that models hold beyond their reserves, in all."""
        return sum(account.borrowed for account in self.accounts(uses))

    def of(self, use: Use) -> Lent:
        """Returns the books of a model."""
        book = self._book(use.number)
        return Lent(book.reserve, max(0, use.held - book.reserve), book.lent, book.unit)

    def _largest(self, total: int) -> int:
        """The most pages of a unit."""
        return max(1, total // PART)

    def _book(self, number: int) -> _Book:
        return self._books.setdefault(number, _Book(Window(self._window)))
