"""The log of a controller: what it was made with, and then each event that it was told, with what it answered.

Note [Log of decisions]
    The supervisor of a server and the simulation write the same lines, of JSON: first a `Setup`, then a `Decision` for
    each event, with `epoch`, `event` and `actions` (text.py). The controller reads no clock and draws no number, so a
    controller of the same setup that is told the events of a log, at their times, answers what is in the log: that is
    how a decision of a server is looked into afterwards, and how a changed policy is compared with it.

    A long log is cut into files. The later one begins with `Continued`, and the setup again: it can be read on its own,
    but answered again only behind the first file, as what its controller knew by then is in no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..tuning import Replicas as Tuning
from .actions import Action
from .chunk_cost import ChunkCost
from .controller import Controller
from .demand import KVSize
from .events import Event
from .text import made, plain


@dataclass(frozen=True, slots=True)
class Setup:
    """What a controller is made with: see there."""

    pages: tuple[int, ...]
    kv: KVSize
    cost: ChunkCost
    tuning: Tuning
    page_seconds: float

    def controller(self) -> Controller:
        """A controller of that setup, which was told nothing yet."""
        return Controller(self.pages, self.kv, self.cost, self.tuning, self.page_seconds)


@dataclass(frozen=True, slots=True)
class Decision:
    """One event, and the `actions` that it was answered with, in order. `epoch`: the last that was given out then."""

    epoch: int
    event: Event
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Continued:
    """The first entry of a file that goes on with a log, of which so many `decisions` were written before."""

    decisions: int


Entry = Setup | Decision | Continued
Note = Callable[[Entry], object]  # is given each entry of a log, in order


def decide(controller: Controller, event: Event, note: Note) -> tuple[Action, ...]:
    """Tells a controller an event, notes that, and returns what is to be done."""
    actions = tuple(controller.on(event))
    note(Decision(controller.epoch, event, actions))
    return actions


def to_line(entry: Entry) -> str:
    """The entry as a line of JSON, without its end."""
    return json.dumps({name: plain(getattr(entry, name)) for name in _FIELDS[type(entry)]})


def from_line(text: str) -> Entry:
    """The entry that `to_line` was called on. ValueError where it is none of this version."""
    try:
        found = {name: made(value) for name, value in json.loads(text).items()}
        kind = Decision if "event" in found else Continued if "decisions" in found else Setup
        return kind(**found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{text[:80]!r} is no line of a log of this version: {error!r}") from None


def replayed(entries: Iterable[Entry]) -> Iterator[tuple[Decision, Decision]]:
    """Each decision of a log, and the one that a controller of its setup takes when it is told the same events at the
    same times. ValueError where the log does not begin with a setup."""
    left = iter(entries)
    setup = next(left, None)
    if isinstance(setup, Continued):
        raise ValueError(
            f"the log goes on behind {setup.decisions} decisions that are not here: it can be read, but what its "
            "controller knew is not known"
        )
    if not isinstance(setup, Setup):
        raise ValueError("a log begins with what its controller was made with")
    controller = setup.controller()
    for each in left:
        if not isinstance(each, Decision):
            raise ValueError("a log is of one controller")
        actions = tuple(controller.on(each.event))
        yield each, Decision(controller.epoch, each.event, actions)


_FIELDS = {each: each.__dataclass_fields__ for each in (Setup, Decision, Continued)}
