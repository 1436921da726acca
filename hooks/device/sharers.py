"""What the processes that share a budget report and ask of each other, by the control socket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...allocator import control
from ...allocator.errors import BallonetError, NotReachable
from ...allocator.shared_ledger import SharedParts
from ...offload.policy.shares import Sharer


def member_of(part: int, floor: int, facts: Mapping[str, Any] | None) -> Sharer:
    """Makes a `Sharer` of the facts that a process reports; with None it gives nothing."""
    if facts is None:
        return Sharer(part, part, part, floor)
    rested = math.inf if facts["rested"] is None else facts["rested"]
    wanted = facts["wanted"] if facts["wanted"] > part else 0
    return Sharer(part, facts["used"], wanted, floor, facts["priority"], rested)


def facts_of(pid: int, number: int, patience: float) -> Mapping[str, Any] | None:
    """Returns the facts of another process's part; None where it does not answer in time."""
    with suppress(BallonetError):
        facts: Mapping[str, Any] | None = control.look(pid, patience=patience, device=number).get("shared")
        return facts
    return None


def ask_to_give(pid: int, now: SharedParts, nbytes: int, timeout: float, patience: float) -> bool | None:
    """Has another process lower its part to so many bytes; False where it cannot and keeps its part, None where it does
    not answer in time."""
    try:
        control.ask_to_give(pid, nbytes, timeout, patience=patience, device=now.parts[pid].number)
    except NotReachable:
        return None
    except BallonetError:
        return False
    return True
