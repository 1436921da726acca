"""Which requests run in the next iteration, and where their KV goes (eLLM §4.4.1, Algorithm 1); how much of the host
new prompts may have for it (§4.4.2, Algorithm 2: `LogicalBuffer`); and when the heap gives back pages that steps do not
use any more (`IdleHeap`). Pure: bytes in, decisions out.

Note [Algorithm 1]
    Read here: P_T are all bytes that KV and activations may have together: free ones, those that may still be created
    under the budget, and those that others give when asked (the published list). Lines 8 and 24 lack an "and". KV that
    goes to the host needs staging on the device while it is written, which is charged like activations. The two phases
    are two loops in the paper; a batch of transformers decodes and prefills at once, so decoding requests come first,
    and what is left is for prompts. Lines 23-27, which say how many pages change between KV and activations, are no
    part of the answer: both take pages from one pool when they need them, and give them back to it.

Note [All or nothing]
    A request gets everything that it needs in this iteration, or nothing: none holds pages while it waits for others
    (§4.4.1, "hold and wait").

Note [No other can go on]
    A request that was preempted is restored to the device. Where there is no room for that, and no other request runs
    that could make some, as other models keep theirs, it goes on with its KV on the host: two models whose requests
    wait for each other's pages would wait for ever.

Note [Blocked heads]
    The paper stops at the first request that does not fit, and so it is here with one that decodes. Smaller ones may go
    before a prompt that does not fit, but only so often: one that was passed over `patience` times is the last that is
    looked at until it fits. As requests that run end, it does, unless it is larger than all that there can ever be;
    such a one is refused before it waits (`can_ever_run`).

Note [Algorithm 2]
    Read here: line 4 means min(2 B, B_max). A violation event is three violations within five iterations; a decode
    step's (TPOT) counts before a first token's (TTFT). The paper begins with 1; here `Serving.buffer` says with how
    much, as without SLOs nothing is violated, and prompts may have all of the host. After an event counting begins
    anew, as the next iterations still show what was before it. A smaller buffer evicts nothing: it only admits no
    request until it is used less.

Note [Pages of a burst]
    Free pages of the heap stay with it, so that steps need no page call, and it keeps what the largest step took.
    Layers that were lent come back for free pages alone. So every so many steps what lies idle is compared with what
    the largest of them needed. Where it is more than twice that, all of it goes, and the next step maps what it takes,
    once. What steps need is an estimate: what the heap has grown to by the next comparison counts instead where it is
    more, as long as steps need at least half of what they needed then. So a load that stays costs no second trim.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from .tuning import DEFAULT, Serving

Where = Literal["device", "host"]
# 1/64 of the budget stays free when requests are admitted (eLLM's threshold): what a forward allocates beyond the
# estimate of its peak. Chosen.
RESERVE: Final = 64
# Bytes for each logit while tokens are chosen: two copies of the scores, sorted ones with their ids, sums in float64.
_LOGIT: Final = 32
_FACTOR: Final = 2  # by which an event changes the buffer: eLLM §4.4.2


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs to take part in the next iteration, in bytes beyond what it has. `kv`: on the device, for
    new tokens and for what has to be fetched; `activations`: at their peak; `staging`: of the device, while `kv` is
    written to the host. `decoding`: its prompt is computed. `passed`: iterations in which others behind it were
    admitted. `away`: the part of `kv` that lies on the host, where it can be read, only slower."""

    request: str
    kv: int
    activations: int
    staging: int = 0
    decoding: bool = False
    passed: int = 0
    away: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `kv`, `activations`: free pages that are mapped for either; `elsewhere`: free, not created yet, or given
    by others when asked; `host`: what KV of prompts may have on the host; `reserve`: what has to stay free, the
    threshold of Algorithm 1. Of `elsewhere`, `dirty` are given only as far as there is `room` for them on the host, and
    `in_use` are in use by others, who are slower without them."""

    kv: int
    activations: int
    elsewhere: int = 0
    host: int = 0
    reserve: int = 0
    dirty: int = 0
    room: float = math.inf
    in_use: int = 0

    @property
    def total(self) -> int:
        """P_T of Algorithm 1."""
        return self.kv + self.activations + self.elsewhere

    @property
    def usable(self) -> int:
        """Bytes that may be used now: without the reserve, and what others cannot give as the host has no room."""
        return self.total - self.reserve - round(max(0, self.dirty - self.room))

    def fits(self, device: int, host: int) -> bool:
        """Are there so many bytes of the device, with so much KV of prompts on the host, beside what others give?"""
        return device <= self.total - self.reserve and max(0, device - self.total + self.dirty) + host <= self.room


@dataclass(frozen=True, slots=True)
class Admission:
    """`where`: the requests that take part, in the order in which they were looked at, and where the KV of each goes.
    `passed`: those that did not fit while others behind them did. `kv`, `activations`: bytes of the device that they
    take in all."""

    where: dict[str, Where]
    passed: frozenset[str]
    kv: int
    activations: int


def admit(
    demands: Iterable[Demand], memory: Memory, tuning: Serving = DEFAULT.serving, pass_over: bool = False
) -> Admission:
    """Admits requests by Algorithm 1: `demands` in the order in which they came. `pass_over`: others that decode go on
    beside one that does not fit. See the notes above."""
    where: dict[str, Where] = {}
    blocked: list[str] = []
    passed: set[str] = set()
    kv = activations = on_host = 0
    for need in sorted(demands, key=lambda demand: not demand.decoding):
        used, new = kv + activations + need.activations, need.kv - need.away
        if memory.fits(used + need.kv, on_host):
            where[need.request] = "device"
            kv, activations = kv + need.kv, activations + need.activations
        elif (
            (not need.decoding or (need.away and not where))
            and new <= memory.host - on_host
            and memory.fits(used + need.staging, on_host + new)
        ):
            where[need.request] = "host"
            on_host, activations = on_host + new, activations + need.staging + need.activations
        else:
            blocked.append(need.request)
            if (need.decoding and not pass_over) or need.passed >= tuning.patience:
                break
            continue
        passed.update(blocked)
    return Admission(where, frozenset(passed), kv, activations)


def can_ever_run(needed: int, staging: int, most: Memory) -> bool:
    """Can a request run once all others have ended? `needed`: bytes of its KV at its end and of its activations;
    `staging`: of the device, should its KV be on the host; `most`: all that there is then."""
    left = most.total - most.reserve
    return needed <= left or (needed <= most.host and staging <= left)


class LogicalBuffer:
    """The logical buffer of one device: `size` bytes of the `most` that there are. Not thread-safe."""

    def __init__(self, most: int, smallest: int, start: int | None = None, tuning: Serving = DEFAULT.serving) -> None:
        """`smallest`: bytes that it never goes below, as one page; `start`: by default the smallest."""
        self._most = most
        self._smallest = min(smallest, most)
        self._tuning = tuning
        self._recent: deque[tuple[bool, bool]] = deque(maxlen=tuning.window)
        self.size = max(self._smallest, min(most, self._smallest if start is None else start))

    def observe(self, *, tpot: bool, ttft: bool) -> int:
        """Notes whether an iteration violated either SLO; returns the size from now on."""
        self._recent.append((tpot, ttft))
        slow_steps, slow_starts = map(sum, zip(*self._recent, strict=True))
        if slow_steps >= self._tuning.violations:
            self.size = max(self.size // _FACTOR, self._smallest)
        elif slow_starts >= self._tuning.violations:
            self.size = min(self.size * _FACTOR, self._most)
        else:
            return self.size
        self._recent.clear()
        return self.size

    def observe_calm(self, iterations: int) -> None:
        """Notes so many iterations that violated no SLO."""
        self._recent.extend([(False, False)] * iterations)

    def open(self) -> bool:
        """Makes it as large as it can be, as nothing runs that it could slow down. Was it smaller?"""
        before, self.size = self.size, self._most
        self._recent.clear()
        return before < self._most

    def usable(self, used: int) -> int:
        """Returns the bytes that new KV may have beside `used` ones."""
        return max(0, min(self._most, self.size) - used)


class IdleHeap:
    """Decides for one loop, every `steps` steps, whether its heap gives back idle pages. Sizes in bytes."""

    def __init__(self, steps: int) -> None:
        self._steps = self._left = steps
        self._largest = 0  # bytes that one of these steps needed
        self._trimmed = False  # were all pages given back before them?
        self._grown = 0, 0  # what lay idle after such steps, and what they needed

    def passed(self, needed: int, steps: int = 1) -> bool:
        """Notes that a step, or so many, needed so much. Is it time to ask `gives`?"""
        self._largest = max(self._largest, needed)
        self._left -= steps
        return self._left <= 0

    def gives(self, idle: int, streams: bool) -> bool:
        """Should the idle pages go? `streams`: do layers stream? Begins the next `steps` steps. See Note [Pages of a
        burst]."""
        if self._trimmed:
            self._grown = idle, self._largest
        grown, needed = self._grown
        self._trimmed = streams and idle > 2 * max(self._largest, grown if 2 * self._largest >= needed else 0)
        self._largest, self._left = 0, self._steps
        return self._trimmed


def logit_rows(budget: int, vocabulary: int) -> int:
    """Returns how many rows of logits a step may work on at once, so that all that is made of them fits into what stays
    free when requests are admitted. `budget`: bytes."""
    return max(1, budget // RESERVE // (_LOGIT * max(1, vocabulary)))
