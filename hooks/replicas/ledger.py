"""The supervisor's ledger: each request that was accepted, until its client has its whole answer.

Note [Never twice]
    Replicas may end at any moment, and a request that is computed again repeats tokens that its client has already.
    Each report says how many tokens came before it, so what is behind the end of what was delivered is new, and the
    rest is compared: sampling is keyed by (seed, position), so a token that differs is an error of the group, which
    ends that request. Reports of an assignment that is not the latest one are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .requests import Request


@dataclass(slots=True)
class Entry:
    """One request, which `came` at this time. `assignment`: counts how often it was given to a group."""

    request: Request
    came: float
    assignment: int = 0


class RepeatedOtherwise(RuntimeError):
    """A request that was computed again has got another token than the one that its client has."""


class Ledger:
    """Used by one thread."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def accept(self, request: Request, now: float) -> None:
        """Takes a request at this time. ValueError where one of this name has not ended."""
        if request.name in self._entries:
            raise ValueError(f"a request {request.name!r} has not ended yet: give each a name of its own")
        self._entries[request.name] = Entry(request, now)

    def assign(self, name: str) -> Entry:
        """Gives a request to a group, to be computed from what was delivered on. KeyError."""
        entry = self._entries[name]
        entry.assignment += 1
        return entry

    def entry(self, name: str) -> Entry:
        """KeyError where it has ended."""
        return self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def deliver(self, name: str, assignment: int, before: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Returns those of the tokens that its client has not got; `before`: tokens of the answer before these. Nothing
        where the request has ended, or was given to a group again since. RepeatedOtherwise; ValueError where tokens
        between are missing."""
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
        """Forgets a request, whose client has its answer, or does not want it. None where it has ended before."""
        return self._entries.pop(name, None)
