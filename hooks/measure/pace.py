"""How long forwards take, how much of that they wait for copies, and the point of the performance record (phase, batch,
length) to which each belongs. The host never waits to find out: a point is read from shapes alone, as reading a value
on a device would make it wait. Most forwards take one function call for it, as it runs for each token.

Note [Launches]
    The time to find is that of the forward with every layer resident. Without its stalls it would be over sooner, but
    on a GPU no sooner than the host has launched all of it: while a stream waits for a copy the host launches on, and
    catches up. So the result is the measured time less the stalls, or the time that the host took, whichever is longer,
    and at most the measured time. A model whose forward itself waits for the device (a `nonzero`, an `item`) keeps the
    host for as long as its stalls, and is taken for slower than it is, never for faster.

Note [What is not timed]
    Forwards inside a CUDA graph's capture are not timed, as their work is done later, nor those that end by an
    exception or an interrupt, as they did not do all their work, nor those that are recorded for pieces of graphs,
    which takes longer. Of forwards by pieces one in so many is (`forget`): to time it would be a part of its cost.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch

from ...offload.record.record import Point
from ..cache_argument import CACHE_NAMES, given_cache
from ..device.streams import Marks

PACKED: Final = frozenset(("cu_seq_lens_q", "cu_seqlens_q", "block_table"))  # sequences of several lengths in one row


def point_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Point | None:
    """The point of a forward with these arguments; None where they are not those of a model that reads tokens in rows.
    For sequences that are packed into one row the cache knows it (`packed`).

    Prefill: nothing is held yet, or several tokens are new; `length` is the new tokens of each sequence, of an
    encoder-decoder's two sides the longer. Decode: one new token each, and `length` tokens held.
    """
    given: dict[str, Any] = {}
    for name, value in kwargs.items():
        if value is not None:
            given[name] = value
    if not PACKED.isdisjoint(given):
        return getattr(given_cache(given), "point", None)
    ids, encoded = given.get("input_ids", given.get("inputs_embeds")), 0
    if ids is None and args:
        first = args[0]  # tokens, [batch, tokens], or something else
        ids = first if isinstance(first, torch.Tensor) and first.dim() == 2 and not first.is_floating_point() else None
    if (decoded := given.get("decoder_input_ids", given.get("decoder_inputs_embeds"))) is not None:
        ids, encoded = decoded, _encoded(ids, given)
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2 or not ids.shape[0] or not ids.shape[1]:
        return None
    batch, new = ids.shape[0], ids.shape[1]
    held: int | None = 0
    for name in CACHE_NAMES:  # `given_cache` without its call
        if (cache := given.get(name)) is not None:
            try:
                held = cache.get_seq_length()
            except (AttributeError, ValueError):  # one of states, not of tokens
                held = None
            held = held if isinstance(held, int) else None  # only the device knows it
            break
    if new == 1 and held != 0:
        return Point("decode", batch, held or _masked(given.get("attention_mask")) or 1)
    return Point("prefill", batch, max(new, encoded))


def packed(sequences: Sequence[tuple[int, int]]) -> Point | None:
    """The point of a batch of sequences, each (new tokens, tokens held); None without sequences.

    Decode where each has one new token: `length` is the mean of the tokens held, so that the work is that of all of
    them. Prefill where any has more: all new tokens count, as those of one sequence.
    """
    if not sequences:
        return None
    most = tokens = held = 0
    for new, before in sequences:  # in one call, as each step asks
        most, tokens, held = max(most, new), tokens + new, held + before
    if most == 1 and tokens == len(sequences):
        return Point("decode", len(sequences), max(1, -(-held // len(sequences))))
    return Point("prefill", 1, tokens)


def _encoded(ids: Any, given: Mapping[str, Any]) -> int:
    """Tokens on the encoder's side, those that it has read or is to read."""
    outputs = given.get("encoder_outputs")
    states = outputs[0] if outputs else ids
    return states.shape[1] if isinstance(states, torch.Tensor) and states.dim() > 1 else 0


def _masked(mask: Any) -> int:
    """Tokens that attention sees: the width of the mask, 0 where there is none."""
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return max((tensor.shape[-1] for tensor in masks if isinstance(tensor, torch.Tensor)), default=0)


class Measured(NamedTuple):
    """Seconds of one forward. `seconds`: with every layer resident; see Note [Launches]. `stall`: spent waiting for
    copies. `total`: measured. `between`: from the beginning of the decode step before it to its own, if it follows that
    directly: the time per token, with sampling and Python; else None. `point`: None where it is not known. `driver`:
    spent in calls of the driver which change page tables. `pieces`: did CUDA graphs launch it (hooks/pieces)?"""

    point: Point | None
    seconds: float
    stall: float
    total: float
    between: float | None = None
    driver: float = 0.0
    pieces: bool = False


PENDING: Final = 64  # forwards, or steps, that wait to be read. Chosen: more than a host launches ahead


class Pace:
    """The times of one model's forwards, of all threads. `begin` and `end` go around an outermost forward, `waiting`
    around each wait for a copy inside of it."""

    def __init__(
        self,
        marks: Marks,
        clock: Callable[[], int] = time.perf_counter_ns,
        driver: Callable[[], int] = int,
    ) -> None:
        """`clock`: the host's, in ns. `driver`: returns the ns that the calling thread has spent in the driver."""
        self.capturing: Final = marks.capturing  # does this thread capture its work?
        self._marks = marks
        self._clock = clock
        self._same = marks.mark is clock  # is a mark a look at the clock?
        self._driver = driver
        self._thread = _Thread()
        self._wait = _Wait(marks, self._thread)
        self._ended: deque[_Forward] = deque()
        self.listeners: list[list[Measured]] = []  # while there are any the time of each forward counts
        self._lock = threading.Lock()  # guards the ended forwards

    def begin(self, point: Point | None) -> None:
        """Begins a forward on this thread; an earlier one that has not ended was interrupted."""
        thread = self._thread
        if thread.forward is not None:
            self._marks.release(thread.forward.marks)
            thread.forward = None
        before, now = thread.before, self._clock()
        if self._marks.capturing():
            thread.before = None
            return
        thread.before, between = None if point is None else (point, now), None
        if before is not None and point is not None and point.phase == "decode":
            last, then = before
            if (last.phase, last.batch, last.length + 1) == point:  # it follows directly
                between = (now - then) / 1e9
        moment = now if self._same else self._marks.mark()
        forward = _Forward()
        forward.point, forward.began, forward.between, forward.pieces = point, now, between, False
        forward.handled, forward.marks, forward.driver = id(sys.exception()), [moment], self._driver()
        thread.forward = forward

    def waiting(self) -> _Wait:
        """Measures a wait: `with pace.waiting():` goes around code that has this thread's stream wait for a copy."""
        return self._wait

    def end(self) -> None:
        """Ends the forward that this thread has begun, if any."""
        thread, forward = self._thread, self._thread.forward
        if forward is None:
            return
        thread.forward = None
        # A different exception is handled than before the forward: the forward raised it.
        if id(sys.exception()) != forward.handled or self._marks.capturing():
            thread.before = None
            self._marks.release(forward.marks)
            return
        moment = self._marks.mark()
        forward.marks.append(moment)
        forward.host = ((moment if self._same else self._clock()) - forward.began) / 1e9
        forward.driver = self._driver() - forward.driver
        with self._lock:
            self._ended.append(forward)
            if len(self._ended) > PENDING:
                self._marks.release(self._ended.popleft().marks)

    def forget(self) -> None:
        """Does not time the forward that this thread has begun."""
        forward, self._thread.forward = self._thread.forward, None
        if forward is not None:
            self._marks.release(forward.marks)

    def replayed(self) -> None:
        """Notes that the forward that this thread has begun was computed by pieces of CUDA graphs."""
        forward = self._thread.forward
        if forward is not None:
            forward.pieces = True

    def drain(self) -> list[Measured]:
        """Returns the forwards measured since that are over on the device too, oldest first; empty during a
        capture."""
        if not self._ended or self._marks.capturing():
            return []
        with self._lock:
            measured = []
            for ended in tuple(self._ended):
                if (times := self._marks.read(ended.marks)) is None:
                    continue
                self._ended.remove(ended)
                total, stall = times[-1], sum(times[2:-1:2]) - sum(times[1:-1:2])
                seconds = max(total - stall, min(total, ended.host)) if self._marks.ahead else total - stall
                driver = ended.driver / 1e9
                measured.append(Measured(ended.point, seconds, stall, total, ended.between, driver, ended.pieces))
            for listener in self.listeners:
                listener.extend(measured)
        return measured

    @contextmanager
    def listening(self) -> Iterator[list[Measured]]:
        """Yields a list to which all forwards are added that any thread drains within the block."""
        heard: list[Measured] = []
        with self._lock:
            self.listeners.append(heard)
        try:
            yield heard
        finally:
            with self._lock:
                self.listeners[:] = [listener for listener in self.listeners if listener is not heard]


Began = tuple[Point, int]  # (point, time by the host's clock)


class _Forward:
    """A forward under measurement. `handled`: id of the exception that was being handled when it began. `marks`: its
    beginning, beginning and end of each wait, its end. `host`: seconds until it was launched. `driver`: ns in the
    driver; until its end those before its beginning. Made without a call of Python, for each token."""

    __slots__ = ("began", "between", "driver", "handled", "host", "marks", "pieces", "point")

    point: Point | None
    began: int
    between: float | None
    handled: int
    marks: list[Any]
    driver: int
    host: float
    pieces: bool


class _Thread(threading.local):
    """The forward that this thread has begun, and the one before that."""

    forward: _Forward | None = None
    before: Began | None = None


class _Wait:
    """A wait of the forward that this thread has begun."""

    def __init__(self, marks: Marks, thread: _Thread) -> None:
        self._marks = marks
        self._thread = thread

    def __enter__(self) -> None:
        forward = self._thread.forward
        if forward is not None:
            forward.marks.append(self._marks.mark())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        forward = self._thread.forward
        if forward is not None:
            forward.marks.append(self._marks.mark())
