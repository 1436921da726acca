"""What the models of a device have reserved, lent and borrowed of its pages (SwiftCache §3.4, §3.5): the books. Who
carries out what they say is exchange.py.

Note [Whose is what]
    There is one pool, and pages are of one size: what changes hands changes its owner, and no byte is moved. So a model
    has no pages of its own, but a reserve: what its caches had in use at one time of the last `window` seconds, in
    whole units, and at least the part of its floor that weights do not take. Scaled up is at the moment when a cache is
    about to grow, before its pages are asked for; scaled down, once a second at most, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..policy.lending import Account, Window, due, master_of, resized, unit_within
from ..policy.tuning import DEFAULT, Loans


@dataclass(slots=True)
class Use:
    """What one model uses, in pages: `used` by caches in use, or about to be; `held` by all of its caches, on the
    device; `block`: that it grows by, 0 while it has none; `floor`: that its KV keeps."""

    number: int
    name: str
    priority: int = 0
    floor: int = 0
    block: int = 0
    used: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Lent:
    """What one model has lent and borrowed, in pages: `reserve`: its own; `borrowed`: that it holds beyond that;
    `lent`: that were its reserve and are for others now; `unit`: of what changes hands."""

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


class Lending:
    """By number of the model. Not thread-safe: whoever calls holds the governor's lock."""

    def __init__(self, window: float, tuning: Loans = DEFAULT.loans) -> None:
        """`window`: seconds."""
        self._window = window
        self._tuning = tuning
        self._books: dict[int, _Book] = {}
        self.due_at = tuning.check  # when it is time to look what can be spared

    def covers(self, use: Use, now: float) -> bool:
        """Is what the model uses its own? It is noted."""
        book = self._book(use.number)
        book.window.use(now, use.used)
        return use.used <= book.reserve

    def look(self, uses: Sequence[Use], now: float, total: int) -> list[tuple[Use, int]]:
        """Reserves follow what is used, of a pool of so many pages. Returns who took back how many of what it had lent,
        or for fewer than none lent them."""
        self.due_at = now + self._tuning.check
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
        """As lending.py wants them."""
        books = [(use, self._book(use.number)) for use in uses]
        return [Account(use.number, book.block, book.reserve, use.held, use.priority) for use, book in books]

    def due(self, uses: Sequence[Use], free: int, total: int) -> dict[int, int]:
        """Pages that each has to give back, so that every reserve is whole."""
        return due(self.accounts(uses), free, self._largest(total))

    def borrowed(self, uses: Sequence[Use]) -> int:
        """Pages of all that are held beyond reserves."""
        return sum(each.borrowed for each in self.accounts(uses))

    def of(self, use: Use) -> Lent:
        """What is in the books of a model."""
        book = self._book(use.number)
        return Lent(book.reserve, max(0, use.held - book.reserve), book.lent, book.unit)

    def _largest(self, total: int) -> int:
        """Pages of a unit, at most."""
        return max(1, total // self._tuning.part)

    def _book(self, number: int) -> _Book:
        return self._books.setdefault(number, _Book(Window(self._window)))
