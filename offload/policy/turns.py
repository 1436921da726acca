"""Who of several models that have work has the device to itself, and for how long (temporal sharing, Oneiros §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A model with work. `since`: when its oldest request began to wait for it, None where none waits; `runs`: has any
    request begun, and not ended? `moves`: seconds to bring what of it is missing."""

    number: int
    since: float | None
    runs: bool
    moves: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Who `has` the device, 0: all; does it `admit` new requests?"""

    has: int
    admits: bool = True


def next_turn(now: float, turn: Turn, began: float, models: Sequence[Waiting], patience: float, most: float) -> Turn:
    """Returns whose turn is next. It ends once another one's oldest request has waited for `patience` times what it
    takes to bring that model: no new requests then, and the next one begins when those that run have ended, or the turn
    has lasted `most` seconds."""
    there = {model.number: model for model in models}
    others = [model for model in models if model.number != turn.has and (model.since is not None or model.runs)]
    present = there.get(turn.has)
    if not others:
        return Turn(turn.has if present is not None else 0)
    first = min(others, key=lambda model: now if model.since is None else model.since)
    if present is None or not (present.runs or present.since is not None):
        return Turn(first.number)
    late = now - (now if first.since is None else first.since) >= patience * first.moves
    if not late:
        return Turn(turn.has)
    if not present.runs or now - began >= most:
        return Turn(first.number)
    return Turn(turn.has, admits=False)
