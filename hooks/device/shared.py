"""A budget that this process shares with others of the same user: joining it, and the part of this process, which asks
for more where it is short and gives what others are due (allocator/shared_ledger.py, offload/policy/shares.py).

Note [How a part moves]
    An allocation that finds no page reports a shortage (reclaim.h), and the thread `ballonet-shared` answers. It takes
    free bytes of the ledger. If those are too few it asks the other processes what they use, and some of them to give,
    by the socket that `ballonet budget` uses. Each of these lowers its own budget as `set_budget()` does, first by idle
    pages and then by its reclaim order, then its part, and answers; the bytes are free in the ledger then. A process
    that does not answer in time is skipped, and not asked again for a while. The thread also checks now and then: if
    few pages are left to a process that works it takes more free bytes; if some of its pages are on the host for want
    of device pages, or requests wait for pages (`lacks`), it takes all that it is due.

Note [A part that the ledger lacks]
    A ledger that was removed, or replaced by an older one, does not have what this process has, and others could take
    it, too. The thread sees that at its next look. It joins again with the bytes that are free, asks others for what
    is missing, and lowers its budget to what it got.

Note [Giving while a forward runs]
    A lower budget counts at once, but a forward gives pages only at its next layer. An allocation that would fail
    before that gets the old budget back: the process gives nothing then, and is asked again.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...allocator import devices, install, looks
from ...allocator._native import Device
from ...allocator.defaults import CONTROL_GRACE, SMALLEST_BUDGET
from ...allocator.devices import Runtime, change_budget
from ...allocator.errors import BallonetError, BudgetInUse, SharedBudgetError
from ...allocator.notices import warn
from ...allocator.shared_ledger import SharedLedger, SharedParts
from ...allocator.units import format_size
from ...offload.policy.shares import Sharer, Sharing, shares
from . import managers
from .shared_total import ask_to_give, facts_of, member_of

_joining = threading.Lock()


class _Giving:
    """Whether the budget is being lowered, and whether that was given up. See Note [Giving while a forward runs]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._given_up = False

    def begin(self) -> None:
        """Marks the beginning of lowering the budget."""
        with self._lock:
            self._now, self._given_up = True, False

    def end(self) -> bool:
        """Marks the end of lowering the budget. Returns whether it was given up meanwhile."""
        with self._lock:
            self._now = False
            return self._given_up

    def give_up(self, undo: Callable[[], None]) -> bool:
        """Calls `undo` if the budget is being lowered, and returns whether it is."""
        with self._lock:
            if self._now:
                self._given_up = True
                undo()
            return self._now


_LOOK: Final = 0.1  # seconds between looks whether a process that works has few free pages left: decode steps. Chosen
_REFUSAL: Final = 0.2  # seconds that a refusal holds, twice as long each time up to `Sharing.dwell`: as above. Chosen


class Share:
    """The part of this process. Thread-safe."""

    def __init__(
        self, runtime: Runtime, ledger: SharedLedger, tuning: Sharing, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: seconds, for decisions that depend on time."""
        self.part = 0  # bytes
        self.floor = SMALLEST_BUDGET * runtime.device.page_size  # bytes
        self.priority = 0
        self.ledger: Final = ledger
        self._runtime: Final = runtime
        self._tuning: Final = tuning
        self._clock: Final = clock
        self._moving = threading.Lock()  # held while the part and the budget change
        self._giving = _Giving()
        self._raised = -math.inf  # when the part was raised last
        self._refused = -math.inf  # the time until which it does not ask again
        self._pause = _REFUSAL / 2  # seconds that the last refusal held
        self._lacking = 0, -math.inf  # (bytes that it could use more, until when that counts)
        self._open = False  # may others still be asked for lacking bytes? False while they use all of theirs
        self._silent: dict[int, float] = {}  # others that did not answer, and until when they are not asked
        self._total = self._others_floors = 0
        self._free = 0  # pages that the ledger had when it was read last
        self._stamp: tuple[int, int] | None = None  # the ledger's when it was read last
        self._reread = -math.inf  # the time until which it is not read again
        self._closed = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="ballonet-shared", daemon=True)

    # -- beginning and end

    def join(self, total: int | None, floor: int, priority: int) -> None:
        """Joins the shared budget. SharedBudgetError, and nothing has changed, where it has no place for the bytes that
        this process uses already."""
        device, page = self._runtime.device, self._runtime.device.page_size
        self.floor = max(self.floor, -(-floor // page) * page)
        self.priority = priority
        device.trim()
        joined = self.ledger.join(os.getpid(), self._runtime.number, total, self.floor)
        try:
            needed = max(self.floor, device.snapshot()["created"] * page)
            self._total = joined.total or 0
            self.part = self._found(needed, needed, others=True)
            if self.part < self.floor:
                raise SharedBudgetError(
                    f"the processes that share {format_size(self._total)} on {self.ledger.device} leave "
                    f"{format_size(self.part)}, and this one needs {format_size(self.floor)}: raise the total with "
                    "`ballonet budget --shared SIZE`, or end one of them"
                )
            change_budget(self._runtime, self.part, self._tuning.patience)
        except BaseException:
            self.ledger.leave(os.getpid())
            raise
        self._raised = self._clock()
        device.hear_shortages(self._total // page, round(2 * self._tuning.patience * 1e9))
        self._thread.start()

    def end(self) -> None:
        """Stops asking, and waits for the thread: see control.py, Note [The end of a process]."""
        self._closed = True
        if self._thread.ident is not None:
            self._thread.join(CONTROL_GRACE)

    def close(self) -> None:
        """Gives back the part, as the device is closed."""
        self.end()
        with suppress(BallonetError, OSError):
            self.ledger.leave(os.getpid())

    # -- what others see and ask

    def facts(self) -> dict[str, Any]:
        """Plain values, in bytes: see Sharer; `device` of the ledger."""
        used, wanted = self._use()
        now = self._clock()
        rested = now - self._raised
        return {
            "device": self.ledger.device,
            "total": self._total,
            "part": self.part,
            "used": used,
            "wanted": wanted,
            "floor": self.floor,
            "priority": self.priority,
            "rested": rested if math.isfinite(rested) else None,
            "prices": _prices(self._runtime),
        }

    def give(self, nbytes: int, patience: float) -> None:
        """Lowers the part to so many bytes, or as near as it can within `patience` seconds. BudgetInUse where that is
        no less than before."""
        page = self._runtime.device.page_size
        with self._moving:
            wanted = max(self.floor, nbytes // page * page)
            if wanted >= self.part:
                return
            try:
                self._lower(wanted, patience)
            except BudgetInUse as error:
                if not wanted < error.smallest < self.part or error.waited:
                    raise
                self._lower(error.smallest, patience)

    def set_budget(self, nbytes: int, patience: float) -> None:
        """Sets the budget for `ballonet.set_budget()`: gives bytes, or takes free ones. SharedBudgetError where too few
        are free, BudgetInUse."""
        with self._moving:
            if nbytes < self.floor:
                raise SharedBudgetError(f"this process keeps {format_size(self.floor)}: ask for that or more")
            if nbytes <= self.part:
                self._lower(nbytes, patience)
                return
            got = self.ledger.raise_to(os.getpid(), nbytes, self._runtime.device.page_size)
            if got < nbytes:
                self.ledger.lower_to(os.getpid(), self.part)
                raise SharedBudgetError(
                    f"a budget of {format_size(nbytes)} was asked for, but of the {format_size(self._total)} that this "
                    f"process shares with others {format_size(got)} are left for it: ask for that or less, or raise "
                    "the total with `ballonet budget --shared SIZE`"
                )
            self._put(got)

    @property
    def reach(self) -> int:
        """Returns the bytes to which the budget could grow if no other process needed more than its floor."""
        return max(self.part, self._total - self._others_floors)

    def reserve(self, nbytes: int) -> None:
        """Takes up to so many bytes more; waits for other processes."""
        self._grow(nbytes, others=True, urgent=True)

    def lacks(self, nbytes: int) -> None:
        """Notes that a scheduler could use so many bytes more. Call it in each step, as it counts for a while only.
        Never waits."""
        before, self._lacking = self._lacks, (nbytes, self._clock() + self._tuning.lacking)
        if nbytes > before:
            self._open = True
            self._runtime.device.lacks(-(-nbytes // self._runtime.device.page_size))

    @property
    def may_grow(self) -> bool:
        """May lacking bytes still be had? False while other processes use all of theirs."""
        return self._open and self._lacks > 0

    @property
    def _lacks(self) -> int:
        nbytes, until = self._lacking
        return nbytes if self._clock() < until else 0

    # -- what happens in the thread

    def _run(self) -> None:
        device = self._runtime.device
        try:
            while not self._closed:
                self._hear(device)
        finally:
            device.hear_shortages(0, 0)  # no allocation waits for an answer from now on

    def _hear(self, device: Device) -> None:
        (missing, last), before = device.shortage(round(_LOOK * 1e9)), self.part
        kept = False
        try:
            if missing:
                kept = last and self._giving.give_up(lambda: device.set_budget(self.part))
                if not kept:
                    self._read_changes()
                    self._grow(missing * device.page_size, others=True, urgent=last)
            elif not self._closed:
                self._keep_ahead()
        except (BallonetError, OSError) as error:
            self._open = False
            if not self._warned and not self._closed:
                self._warned = True
                warn(f"this process keeps its part of the shared budget: {error}")
        finally:
            device.answer_shortage(kept or self.part > before)

    def _read_changes(self) -> bool:
        """Reads the ledger if it has changed, or may have: see Note [A part that the ledger lacks]. Returns whether it
        seems unchanged. BudgetInUse: what the ledger lacks is tried again later."""
        now, stamp = self._clock(), self.ledger.stamp
        same = stamp == self._stamp
        if not same or now >= self._reread:
            self._stamp, self._reread = stamp, now + self._tuning.reread
            parts, me = self.ledger.read(), os.getpid()
            self._see(parts)
            if (me not in parts.parts or parts.parts[me].nbytes != self.part) and self._moving.acquire(blocking=False):
                try:
                    renew = partial(self.ledger.renew, me, self._runtime.number, self.floor, self._total, self.part)
                    part = renew(self._runtime.device.page_size)
                    if part < self.part:
                        self._ask_others(self.part, True)
                        part = renew(self._runtime.device.page_size)
                    if part < self.part:
                        self._lower(max(part, self.floor), self._tuning.patience)
                finally:
                    self._moving.release()
        return same

    def _keep_ahead(self) -> None:
        """Takes more while the process works: free bytes where few pages are left, all that it is due where it lacks
        some or has pages on the host."""
        same = self._read_changes()
        device = self._runtime.device
        manager = managers.known(self._runtime)
        standing = None if manager is None else manager.standing()
        now = self._clock()
        active = standing if standing is not None and standing.active else None
        lacking = self._lacks + (0 if active is None else active.away * device.page_size)
        slack, wanted = self._total // self._tuning.margin, self.part + lacking
        if lacking and same and now < self._refused:
            return
        if lacking:
            due = self._grow(lacking, others=True)
            self._open = self._open if due is None else due < wanted
        elif active and self._free and device.available * device.page_size < max(slack, self.part // 3):
            self._grow(slack, others=False)

    def _grow(self, nbytes: int, *, others: bool, urgent: bool = False) -> int | None:
        """Raises the part by so many bytes, and a step more if that is free. `others`: ask other processes. `urgent`:
        count bytes that they do not use as idle at once, as nothing else helps. Returns the bytes that this process is
        due; None where no other was asked."""
        if self._clock() < self._refused and not urgent:
            others = False
        if not self._moving.acquire(blocking=urgent):  # a give is in progress
            return None
        try:
            before = self.part
            most = before + nbytes + self._total // self._tuning.margin
            self._put(self._found(before + nbytes, most, others=False))
        finally:
            self._moving.release()
        if not others or self.part >= before + nbytes:
            return None
        deadline = self._clock() + self._tuning.patience
        while True:
            # Without the lock: an asked process may ask this one meanwhile.
            due, gave = self._ask_others(before + nbytes, urgent)
            if self._moving.acquire(blocking=urgent):
                try:
                    self._put(self._found(max(self.part, min(due, before + nbytes)), most, others=False))
                finally:
                    self._moving.release()
            # A third process may have taken the bytes that were given.
            if not urgent or not gave or self.part > before or self._closed or self._clock() >= deadline:
                break
        if self.part < before + nbytes:
            self._pause = min(2 * self._pause, self._tuning.dwell)
            self._refused = self._clock() + self._pause
        return due

    def _found(self, needed: int, most: int, *, others: bool) -> int:
        """Returns the part to which it was raised: at most `most`, and with `others` asked at least `needed`."""
        me, page = os.getpid(), self._runtime.device.page_size
        got = self.ledger.raise_to(me, most, page)
        if others and got < needed:
            self._ask_others(needed, True)
            got = self.ledger.raise_to(me, needed, page)
        return got

    def _ask_others(self, wanted: int, urgent: bool) -> tuple[int, bool]:
        """Asks other processes to give, so that this one may have `wanted` bytes, as far as it is due. Returns (the
        bytes it is due, whether any process gave)."""
        now = self.ledger.read()
        self._see(now)
        me, deadline = os.getpid(), self._clock() + self._tuning.patience
        pids = sorted(now.parts)
        members = [self._member(pid, now, wanted if pid == me else 0) for pid in pids]
        if urgent:
            members = [replace(member, rested=math.inf) for member in members]
        if me not in now.parts:
            return self.part, False
        gave, total = False, min(now.total or 0, now.target or 0)
        due = dict(zip(pids, shares(total, members, self._tuning), strict=True))
        for pid in pids:
            left = deadline - self._clock()
            if pid != me and due[pid] < now.parts[pid].nbytes and left > 0:
                given = ask_to_give(pid, now, due[pid], min(left, self._tuning.patience), self._tuning.answer)
                self._note_answer(pid, given is not None)
                gave |= given is True
        return due[me], gave

    def _member(self, pid: int, now: SharedParts, wanted: int) -> Sharer:
        part = now.parts[pid]
        if pid == os.getpid():
            used, _ = self._use()
            return Sharer(part.nbytes, used, max(wanted, part.nbytes), part.floor, self.priority, 0.0)
        facts = None
        if self._silent.get(pid, -math.inf) <= self._clock():
            facts = facts_of(pid, part.number, self._tuning.answer)
            self._note_answer(pid, facts is not None)
        return member_of(part.nbytes, part.floor, facts)

    def _note_answer(self, pid: int, answered: bool) -> None:
        """A process that does not answer in time is not asked for a while."""
        if not answered:
            self._silent[pid] = self._clock() + self._tuning.silent

    def _see(self, now: SharedParts) -> None:
        """Notes a new total, and what other processes keep."""
        if now.total is None:  # the ledger is gone: see Note [A part that the ledger lacks]
            return
        me, page = os.getpid(), self._runtime.device.page_size
        total = min(now.total or 0, now.target or 0)
        self._free = now.free // page
        self._others_floors = sum(part.floor for pid, part in now.parts.items() if pid != me)
        if total != self._total:
            self._total, self._refused, self._pause = total, -math.inf, _REFUSAL / 2
            self._runtime.device.hear_shortages(total // page, round(2 * self._tuning.patience * 1e9))

    # -- the budget; the caller holds `_moving`

    def _put(self, part: int) -> None:
        if part > self.part:
            self._runtime.device.set_budget(part)
            lacking, until = self._lacking
            self._lacking, self._pause = (max(0, lacking - part + self.part), until), _REFUSAL / 2
            self.part, self._raised = part, self._clock()

    def _lower(self, part: int, patience: float) -> None:
        device, began = self._runtime.device, self._clock()
        self._giving.begin()
        try:
            change_budget(self._runtime, part, patience)
        finally:
            given_up = self._giving.end()
        if given_up:
            device.set_budget(self.part)
            raise BudgetInUse(device.snapshot()["created"] * device.page_size, part, self._clock() - began)
        self.ledger.lower_to(os.getpid(), part)
        self.part = part

    def _use(self) -> tuple[int, int]:
        """Returns (bytes that this process uses, bytes that it could use)."""
        snapshot, page = self._runtime.device.snapshot(), self._runtime.device.page_size
        manager = managers.known(self._runtime)
        standing = None if manager is None else manager.standing()
        owned = sum(snapshot["pages"][owner] for owner in ("weights", "activations", "kv", "pending_free"))
        used = owned - snapshot["heap"]["cached"] // page - (standing.idle if standing is not None else 0)
        used = max(0, used) * page
        if standing is None or not standing.active:
            return used, used + self._lacks
        used = min(self.part, used + self._total // (2 * self._tuning.margin))
        return used, used + standing.away * page + self._lacks


def _prices(runtime: Runtime) -> list[tuple[int, float]]:
    """What the process would give next, see Sharer: free pages cost nothing."""
    device, page, manager = runtime.device, runtime.device.page_size, managers.known(runtime)
    free = device.available * page + device.snapshot()["heap"]["cached"]
    listed = [] if manager is None else manager.reclaim.prices()
    return [(free, 0.0), *((pages * page, price / page) for pages, price in listed)]


def join(runtime: Runtime, wanted: int | bool, floor: int, priority: int, tuning: Sharing) -> None:
    """Joins the shared budget of that device: `wanted` bytes in all, or True for the total that others have set. In a
    process that has joined already, only raises its priority to that of its models. SharedBudgetError, LedgerDamaged,
    OSError."""
    total = None if wanted is True else int(wanted)
    with _joining:
        if isinstance(runtime.shared, Share):
            share = runtime.shared
            if total is not None and total != share.ledger.read().total:
                raise SharedBudgetError(
                    "this process shares a budget of another size already: change it for all who share it with `python "
                    "-m ballonet budget --shared SIZE`"
                )
            share.priority = max(share.priority, priority)
            return
        if not runtime.settings.control:
            raise SharedBudgetError(
                "processes that share a budget ask each other through the control socket, which BALLONET_CONTROL=0 "
                "forbids: leave that out"
            )
        install.listen()
        share = Share(runtime, SharedLedger(_name(runtime.device)), tuning)
        share.join(total, floor, priority)
        runtime.shared = share
        looks.publish(runtime, "shared", _published)


def reach(device: Device) -> int:
    """Returns the bytes to which the budget of the device could grow by itself."""
    share = _of(device)
    return device.budget if share is None else share.reach


def reserve(device: Device, pages: int) -> None:
    """Takes up to so many pages more where the budget is shared."""
    share = _of(device)
    if share is not None and pages > 0:
        with suppress(BallonetError, OSError):
            share.reserve(pages * device.page_size)


def give_back(device: Device) -> None:
    """Returns what this process does not use of a shared budget, as a model sleeps."""
    share = _of(device)
    if share is not None:
        with suppress(BallonetError, OSError):
            share.give(device.snapshot()["created"] * device.page_size, 0)


def may_grow(device: Device) -> bool:
    """May the bytes reported by `lacks` still be had? False where other processes use them."""
    share = _of(device)
    return share is not None and share.may_grow


def lacks(device: Device, nbytes: int) -> None:
    """Reports that a scheduler on the device could use so many bytes more; see `Share.lacks`."""
    share = _of(device)
    if share is not None:
        share.lacks(nbytes)


def _of(device: Device) -> Share | None:
    share = next((runtime.shared for runtime in devices.every() if runtime.device is device), None)
    return share if isinstance(share, Share) else None


def _name(device: Device) -> str:
    if device.kind == "standin":
        return "cpu"
    from .key import uuid_of

    return uuid_of(device)


def _end() -> None:
    for runtime in devices.every():
        if isinstance(runtime.shared, Share):
            runtime.shared.end()


def _forget() -> None:
    for runtime in devices.every():
        if isinstance(runtime.shared, Share):
            runtime.shared._closed = True  # the child of a fork has no part
            runtime.shared = None


def _published(runtime: Runtime) -> dict[str, Any] | None:
    return runtime.shared.facts() if isinstance(runtime.shared, Share) else None


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
