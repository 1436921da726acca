"""What is compared of the logs of two controllers that were told of the same script, one live and one simulated.

Times differ, and with them which requests run or wait in a moment. What does not depend on them has to be equal:

    - every decision that changes replicas, in order, with its epoch: who is on its own, which replicas are prepared to
      form which groups with which spans, what is committed, which layers each stage pulls from which, what is
      discarded, fenced, told to rejoin, and why;
    - what replicas said of each epoch: who had prepared it, taken it up, all its KV, all its layers;
    - of each request, in the order of their arrival: its lengths, how often it was given to a group, was computed anew,
      was held, and how it ended.

What is left out, as it follows the clock: loads and ticks; `Decline`, which is said again and again; which group a
request goes to, and which member of a new group has more waiting and so is its first stage (replicas are named by their
stage in what they pull); where requests that still run go at a restore (`Commit.homes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ballonet.hooks.server.load import RecordedArrival
from ballonet.hooks.virtual_replicas.faults import Killed, NewReplica, PlayedFault
from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.groups import Group
from ballonet.offload.policy.replicas.protocol import Action, Decision, Entry

_SAID = (protocol.Prepared, protocol.Committed, protocol.Exchanged, protocol.Restored)
_FAILED = (protocol.PrepareFailed, protocol.PullFailed, protocol.Lost, protocol.Damaged)


@dataclass(slots=True)
class Outline:
    """The comparable part of a log. `requests`: of each by its place, what happened to it, and how often."""

    changes: list[tuple[object, ...]] = field(default_factory=list)
    said: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    requests: list[Counter[str]] = field(default_factory=list)


def outline(log: Iterable[Entry]) -> Outline:
    """The outline of a log."""
    found = Outline()
    names: dict[str, int] = {}
    stages: dict[int, int] = {}  # of the members of the last groups that were prepared to drop
    for each in log:
        if not isinstance(each, Decision):
            continue
        event = each.event
        if isinstance(event, protocol.Arrived):
            names[event.request] = len(names)
            found.requests.append(Counter({f"{event.prompt} and {event.new} tokens": 1}))
        elif isinstance(event, protocol.Finished | protocol.Left):
            found.requests[names[event.request]][type(event).__name__] += 1
        elif isinstance(event, _SAID):
            found.said[type(event).__name__, event.epoch, event.member] += 1
        elif isinstance(event, _FAILED):
            found.changes.append((type(event).__name__, event.member))
        for action in each.actions:
            _note(action, found, names, stages)
    return found


def _note(action: Action, found: Outline, names: dict[str, int], stages: dict[int, int]) -> None:
    kind = type(action).__name__
    match action:
        case protocol.Dispatch() | protocol.Hold() | protocol.Cancel():
            found.requests[names[action.request]][kind] += 1
        case protocol.Recompute():
            for name in action.requests:
                found.requests[names[name]][kind] += 1
        case protocol.Refuse():
            found.requests[names[action.request]][f"{kind}: {action.reason.value}"] += 1
        case protocol.Prepare():
            for group in action.groups:
                if group.is_dropped:
                    stages.update({member: stage for stage, member in enumerate(group.members)})
            found.changes.append((kind, action.epoch, _groups(action.groups), len(action.pulls)))
        case protocol.Commit():
            found.changes.append((kind, action.epoch))
        case protocol.StartRestore():
            pulls: dict[int, list[tuple[int, int | None]]] = {}
            for each in action.pulls:
                source = None if each.source is None else stages[each.source]
                pulls.setdefault(stages[each.member], []).append((each.layer, source))
            found.changes.append((kind, action.epoch, sorted(pulls.items())))
        case protocol.Decline():
            pass
        case _:
            found.changes.append((kind, action))


def _groups(groups: Iterable[Group]) -> list[tuple[object, ...]]:
    return sorted((sorted(group.members), group.spans) for group in groups)


def script(log: Iterable[Entry]) -> tuple[list[RecordedArrival], list[PlayedFault]]:
    """What happened to a controller from outside, by its log, at seconds after the first event: requests that came, and
    replicas that joined and ended."""
    decisions = [each for each in log if isinstance(each, Decision)]
    first = decisions[0].event.at
    arrivals, faults = list[RecordedArrival](), list[PlayedFault]()
    for each in decisions:
        event, at = each.event, each.event.at - first
        match event:
            case protocol.Arrived():
                arrivals.append(RecordedArrival(at, event.prompt, event.new))
            case protocol.Joined():
                faults.append(NewReplica(at, event.member))
            case protocol.Lost():
                faults.append(Killed(at, event.member))
    return arrivals, faults
