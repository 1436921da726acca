"""The books of what models of a device have reserved, lent and borrowed (SwiftCache §3.4, §3.5). repayment.py moves the
pages.

Note [Reserves]
    There is one pool, and pages are of one size: what changes hands changes its owner, and no byte is moved. So a model
    has no pages of its own, but a reserve: what its caches had in use at one time of the last `window` seconds, in
    whole units, and at least the part of its floor that weights do not take. A reserve is scaled up when a cache is
    about to grow, before its pages are asked for, and scaled down at most once a second, at a `look`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..policy.lending import Account, Window, due, master_of, resized, unit_within
from ..policy.tuning import DEFAULT, Loans


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


class Lending:
    """The books of all models, by number. Not thread-safe: callers hold the governor's lock."""

    def __init__(self, window: float, tuning: Loans = DEFAULT.loans) -> None:
        """`window`: seconds."""
        self._window = window
        self._tuning = tuning
        self._books: dict[int, _Book] = {}
        self.due_at = tuning.check  # when it is time to look what can be spared

    def covers(self, use: Use, now: float) -> bool:
        """Notes what the model uses. Is it within the reserve?"""
        book = self._book(use.number)
        book.window.use(now, use.used)
        return use.used <= book.reserve

    def look(self, uses: Sequence[Use], now: float, total: int) -> list[tuple[Use, int]]:
        """Updates reserves to what is used, in a pool of `total` pages. Returns the models that took back pages they
        had lent, with how many; negative: newly lent."""
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
        return max(1, total // self._tuning.part)

    def _book(self, number: int) -> _Book:
        return self._books.setdefault(number, _Book(Window(self._window)))
