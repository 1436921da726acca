"""The total of a budget that processes share, as `ballonet budget --shared` shows and changes it, and what those
processes report and ask of each other by the control socket. Needs no torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...allocator import control
from ...allocator.errors import BallonetError, NotReachable, SharedBudgetError
from ...allocator.shared_ledger import SharedLedger, SharedParts, ledgers
from ...allocator.units import format_size
from ...offload.policy.shares import SHARING, Sharer, shares


def member_of(part: int, floor: int, facts: Mapping[str, Any] | None) -> Sharer:
    """Makes a `Sharer` of the facts that a process reports; with None it gives nothing."""
    if facts is None:
        return Sharer(part, part, part, floor)
    rested = math.inf if facts["rested"] is None else facts["rested"]
    wanted = facts["wanted"] if facts["wanted"] > part else 0
    prices = tuple((nbytes, price) for nbytes, price in facts["prices"])
    return Sharer(part, facts["used"], wanted, floor, facts["priority"], rested, prices)


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


def change_total(device: str | None, total: int | None, timeout: float) -> list[dict[str, Any]]:
    """Sets the shared budget of `device` (None for the only one) to `total` bytes, unless None, and returns the parts
    of each shared budget of this user. A lower total is reached by steps: no part grows, and each process gives what
    exceeds its new part. SharedBudgetError, with the total unchanged, where it is not reached after `timeout` seconds,
    or all processes have answered and none gives any more."""
    chosen = [ledger for ledger in ledgers() if device in (None, ledger.device)]
    if total is not None:
        if len(chosen) != 1:
            names = ", ".join(ledger.device for ledger in chosen)
            raise SharedBudgetError(
                f"processes share budgets on several devices: say which by --device ({names})"
                if chosen
                else "no process shares a budget: give the first one its size, as shared_budget='24GiB'"
            )
        _change_total(chosen[0], total, time.monotonic() + timeout)
    return [_said(ledger) for ledger in chosen]


def _change_total(ledger: SharedLedger, total: int, deadline: float) -> None:
    now, tuning = ledger.aim(total), SHARING
    while now.total != total:
        before, parts = now.taken, sorted(now.parts.items())
        facts = [facts_of(pid, part.number, tuning.answer) for pid, part in parts]
        members = [member_of(part.nbytes, part.floor, its) for (_, part), its in zip(parts, facts, strict=True)]
        gave = [
            ask_to_give(pid, now, due, max(0.0, deadline - time.monotonic()), tuning.answer)
            for (pid, part), due in zip(parts, shares(total, members, tuning), strict=True)
            if due < part.nbytes
        ]
        now, answered = ledger.read(), None not in (*facts, *gave)
        if now.total != total and ((answered and now.taken >= before) or time.monotonic() >= deadline):
            ledger.give_up()
            raise SharedBudgetError(
                f"a total of {format_size(total)} was asked for, but the processes have {format_size(now.taken)}, "
                f"which they cannot give: the total is {format_size(now.total or 0)} as before. Ask for "
                f"{now.taken} bytes or more, end a request, or end a process"
            )


def _said(ledger: SharedLedger) -> dict[str, Any]:
    now, rows = ledger.read(), []
    for pid, part in now.parts.items():
        facts = facts_of(pid, part.number, SHARING.answer)
        seen = {key: None if facts is None else facts[key] for key in ("used", "wanted", "priority")}
        rows.append({"pid": pid, "part": part.nbytes, "floor": part.floor, **seen})
    return {"device": ledger.device, "total": now.total, "free": now.free, "parts": rows}
