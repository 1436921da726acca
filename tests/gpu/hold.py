"""Streams, copies and threads that go on until a scene says so: whoever does not wait for them is early in any case."""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Timer
from typing import Any

from ballonet.allocator._native import Transfer

from .scene import Lane, Place

SEMAPHORE = 64  # bytes that a sem_t has at the most
PATIENCE = 30.0  # seconds after which the stream goes on in any case: a host waits for it that should not
SOON = 0.5  # seconds after which it goes on for who is to wait with the host
LONG = 3.0  # seconds in which a lane is done that does not wait for it


class Hold:
    """A lane that goes on with what it is given from now on once this is released; on a CPU at once."""

    def __init__(self, place: Place, lane: Lane | None = None) -> None:
        """`lane`: that goes on later than what it was given so far; None: one of its own."""
        self.lane = lane or place.lane()
        self.released = not place.cuda
        self._expired = False
        self._gate = ctypes.create_string_buffer(SEMAPHORE)
        self._timer: Timer | None = None
        if place.cuda:
            libc, driver = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
            self._post: Any = libc.sem_post
            assert libc.sem_init(self._gate, 0, 0) == 0
            wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p)  # no code of Python's: it holds no lock
            assert driver.cuLaunchHostFunc(ctypes.c_void_p(self.lane.handle), wait, self._gate) == 0
            self._release_in(PATIENCE, self._expire)

    def release(self) -> None:
        """Idempotent."""
        if not self.released:
            self.released = True
            self._post(self._gate)

    def release_soon(self) -> None:
        """For a host that is to wait for it: it still waits then."""
        if not self.released:
            self._release_in(SOON, self.release)

    def _release_in(self, seconds: float, release: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = Timer(seconds, release)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        self._expired = True
        faulthandler.dump_traceback(file=sys.__stderr__)  # who waits, and where
        self.release()

    def keeps(self, done: Callable[[], bool]) -> None:
        """What `done` asks after waits for it: it has not been done, and will not be."""
        end = time.monotonic() + LONG
        while not self.released and time.monotonic() < end:
            assert not done(), "it did not wait for what is held"
            time.sleep(0.01)

    def close(self) -> None:
        """Releases it, and waits for what the lane was given."""
        self.release()
        if self._timer is not None:
            self._timer.cancel()
        if self.lane.stream is not None:
            self.lane.stream.synchronize()
        assert not self._expired, "the host waited for what was held"


@contextmanager
def held(place: Place) -> Iterator[Hold]:
    """Until the block ends, or it is released before."""
    hold = Hold(place)
    try:
        yield hold
    finally:
        hold.close()


@contextmanager
def held_copies(place: Place, to: Any) -> Iterator[Hold]:
    """No copy to the device, or from it ("host"), begins until the block ends, or the hold is released before."""
    ranges = [place.range(1) for _ in range(2)] if place.cuda else []
    with held(place) as hold:
        if place.cuda:
            one, other = ranges
            copies = [(one.address, other.address, place.page)]
            Transfer(place.device).copy(copies, after=hold.lane.handle, owner="kv", to=to)
        yield hold
    for memory in ranges:
        memory.close()
    place.device.reap()


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Another thread acts again and again until the block ends. What it raises is raised there."""
    stop = Event()

    def acts() -> None:
        while not stop.is_set():
            act()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(acts)
        try:
            yield
        finally:
            stop.set()
    done.result()
