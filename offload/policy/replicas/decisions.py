"""The log of a controller: its constructor arguments, then each event with the actions that it returned.

Note [Log of decisions]
    The supervisor of a server and the simulation write the same JSON lines: first a `Setup`, then a `Decision` for each
    event, with `epoch`, `event` and `actions`; `type` names the class of each. The controller reads no clock and
    draws no random number, so another one with the same setup that gets the logged events at their times takes the
    logged actions. So a decision of a server can be examined afterwards, and a changed policy compared with it.

    A long log is cut into files. A later file begins with `Continued` and the setup again: it can be read alone, but
    replayed only after the earlier files, as the state of its controller at that point is not written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Union

import msgspec
from msgspec import Struct

from ..tuning import Replicas as Tuning
from .actions import Action
from .chunk_cost import ChunkCost
from .controller import Controller
from .demand import KVSize
from .events import Event


class Setup(Struct, frozen=True):
    """The arguments of `Controller`."""

    pages: tuple[int, ...]
    kv: KVSize
    cost: ChunkCost
    tuning: Tuning
    page_seconds: float

    def controller(self) -> Controller:
        """Returns a new controller with these arguments."""
        return Controller(self.pages, self.kv, self.cost, self.tuning, self.page_seconds)


class Decision(Struct, frozen=True):
    """One event, and the `actions` that the controller returned, in order. `epoch`: its latest epoch number then."""

    epoch: int
    event: Event
    actions: tuple[Action, ...]


class Continued(Struct, frozen=True, forbid_unknown_fields=True):
    """The first entry of a later file of a log: how many `decisions` the earlier files have."""

    decisions: int


EVENTS: Final[Any] = Union[tuple(Event.__subclasses__())]  # noqa: UP007 (made of a list)
ACTIONS: Final[Any] = Union[tuple(Action.__subclasses__())]  # noqa: UP007
Entry = Setup | Decision | Continued
Note = Callable[[Entry], object]  # is given each entry of a log, in order


def decide(controller: Controller, event: Event, note: Note) -> tuple[Action, ...]:
    """Passes an event to a controller, logs the decision with `note`, and returns the actions."""
    actions = tuple(controller.on(event))
    note(Decision(controller.epoch, event, actions))
    return actions


def to_line(entry: Entry) -> str:
    """Returns the entry as a line of JSON, without the line end."""
    return json.dumps(msgspec.to_builtins(entry))  # of Python, as msgspec writes an infinite number of seconds as null


def from_line(text: str) -> Entry:
    """Returns the entry of a line, the inverse of `to_line`. ValueError: no entry of this version."""
    try:
        fields = json.loads(text)
        if "event" in fields:
            event = msgspec.convert(fields["event"], EVENTS)
            return Decision(fields["epoch"], event, msgspec.convert(fields["actions"], tuple[ACTIONS, ...]))
        kind: type[Continued | Setup] = Continued if "decisions" in fields else Setup
        return msgspec.convert(fields, kind)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"{text[:80]!r} is no line of a log of this version: {error!r}") from None


def replayed(entries: Iterable[Entry]) -> Iterator[tuple[Decision, Decision]]:
    """Yields each decision of a log, and the one that a new controller takes for the same event at the same time.
    ValueError where the log does not begin with a setup."""
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
    for entry in left:
        if not isinstance(entry, Decision):
            raise ValueError("a log is of one controller")
        actions = tuple(controller.on(entry.event))
        yield entry, Decision(controller.epoch, entry.event, actions)
