"""The supervisor's ledger: each accepted request, with its delivered tokens, until its client has the whole answer.

Note [Never twice]
    Replicas may end at any moment, and a request that is computed anew repeats tokens that its client already has. Each
    report has the number of earlier tokens, so tokens beyond the delivered ones are new, and the rest is compared:
    sampling is keyed by (seed, position), so a token that differs is an error of the group, which ends that request.
    Reports of an assignment other than the latest are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .requests import Request


@dataclass(slots=True)
class Entry:
    """One request. `came`: when it arrived; `assignment`: counts how often it was given to a group."""

    request: Request
    came: float
    assignment: int = 0


class RepeatedOtherwise(RuntimeError):
    """A request that was computed anew has another token than the delivered one."""


class RequestLedger:
    """The requests that have not ended. Used by one thread. See Note [Never twice]."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def accept(self, request: Request, now: float) -> None:
        """Adds a request that arrives `now`. ValueError where one of this name has not ended."""
        if request.name in self._entries:
            raise ValueError(f"a request {request.name!r} has not ended yet: give each a name of its own")
        self._entries[request.name] = Entry(request, now)

    def assign(self, name: str) -> Entry:
        """Counts that a request is given to a group, to be computed after its delivered tokens. KeyError."""
        entry = self._entries[name]
        entry.assignment += 1
        return entry

    def entry(self, name: str) -> Entry:
        """Returns the entry of a request. KeyError where it has ended."""
        return self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def deliver(self, name: str, assignment: int, before: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Appends reported tokens, and returns those that are new to the client; none where the request has ended, or
        has a later assignment. `before`: tokens of the answer before these. RepeatedOtherwise; ValueError where tokens
        in between are missing."""
        entry = self._entries.get(name)
        if entry is None or entry.assignment != assignment:
            return ()
        had = entry.request.delivered
        if before > len(had):
            raise ValueError(f"request {name}: tokens {len(had)} to {before} of its answer never came")
        again = had[before : before + len(tokens)]
        if again != tokens[: len(again)]:
            raise RepeatedOtherwise(f"request {name} was computed again, with other tokens behind {before}")
        new = tokens[len(again) :]
        for token in new:
            entry.request = entry.request.with_token(token)
        return new

    def end(self, name: str) -> Entry | None:
        """Removes a request whose client has its answer, or has gone away, and returns its entry; None where it has
        ended before."""
        return self._entries.pop(name, None)
