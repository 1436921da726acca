"""Virtual time: a queue of actions, and tasks that wait in it, of which one runs at a time.

Note [Tasks]
    The main loops of the supervisor and of replicas wait: for messages, links, and in a simulation for a computation.
    So each runs on a thread of its own, and hands over to the queue when it waits: no two of them ever run at once, and
    which one runs next is decided by the queue alone. Two runs with the same actions are the same, step by step.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import TypeVar

from ..replicas.channel import Wakeup

_Found = TypeVar("_Found")


class Ended(BaseException):
    """Ends a task from outside, as SIGKILL a process."""


class VirtualTime:
    """Actions by their time in seconds; those of one time in the order in which they were added. Used by one thread,
    and by the task that it runs. `running`: that task, None between them. Call `close` at the end."""

    def __init__(self) -> None:
        self.running: Task | None = None
        self.tasks: list[Task] = []
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._added = 0

    def now(self) -> float:
        """Returns the time of the latest action performed."""
        return self._now

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Schedules `act` at that time, or now if that has passed."""
        self._added += 1
        heapq.heappush(self._queue, (max(when, self._now), self._added, act))

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Schedules `act` in so many seconds."""
        self.at(self._now + seconds, act)

    def step(self) -> bool:
        """Advances to the next action, and performs it. Returns whether there was one. Raises what it raises, or the
        task that it has run."""
        if not self._queue:
            return False
        self._now, _, act = heapq.heappop(self._queue)
        act()
        return True

    def start(self, act: Callable[[], object]) -> Task:
        """Returns a task that will call `act`, from now on."""
        task = Task(self, act)
        self.tasks.append(task)
        task.wake()
        return task

    def sleep(self, seconds: float) -> None:
        """Has the running task wait for so long. Ended."""
        assert self.running is not None
        self.running.wait(self._now + seconds)

    def close(self) -> None:
        """Ends all tasks."""
        for task in self.tasks:
            task.end()
        while any(not task.is_over for task in self.tasks) and self.step():
            pass


class Task:
    """A thread that runs only while VirtualTime lets it. See Note [Tasks]. `is_over`: it has returned, or was ended."""

    def __init__(self, time: VirtualTime, act: Callable[[], object]) -> None:
        self.is_over = False
        self._time = time
        self._act = act
        self._wait = 0  # number of the present wait: a wake is for one of them
        self._is_woken = False
        self._is_paused = False
        self._is_late = False  # it was woken while it was paused
        self._is_ending = False
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, name="ballonet virtual task", daemon=True).start()

    def wait(self, until: float | None) -> None:
        """Waits until it is woken, or until that time. Called by the task itself. Ended."""
        self._begin_wait()
        if until is not None:
            number = self._wait
            self._time.at(until, lambda: self._resume(number))
        self._back.release()
        self._go.acquire()
        if self._is_ending:
            raise Ended

    def wake(self) -> None:
        """Ends the present wait, now. Idempotent."""
        if not self._is_woken:
            self._is_woken, number = True, self._wait
            self._time.at(0.0, lambda: self._resume(number))

    def pause(self) -> None:
        """Stops the task, from its present wait on."""
        self._is_paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._is_paused, is_late = False, self._is_late
        self._is_late = False
        if is_late:
            number = self._wait
            self._time.at(0.0, lambda: self._resume(number))

    def end(self) -> None:
        """Ends the task with its present wait, also if it is paused. Idempotent."""
        self._is_ending, self._is_paused, self._is_woken = True, False, False
        self.wake()

    def _begin_wait(self) -> None:
        self._wait += 1
        self._is_woken = False

    def _resume(self, number: int) -> None:
        """Runs the task until it waits again. Nothing where this wait has ended."""
        if self.is_over or number != self._wait:
            return
        if self._is_paused:
            self._is_late = True
            return
        self._wait += 1  # what else was to wake it does not
        self._time.running = self
        self._go.release()
        self._back.acquire()
        self._time.running = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_ending:
                self._act()
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        self.is_over = True
        del self._act
        self._back.release()


class VirtualWakeup(Wakeup):
    """The wait of one task for anything. See VirtualTime."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time.now)
        self._time = time
        self._waiting: Task | None = None
        self._turned, self._turns = -1.0, 0  # when it waited last, and how often at that time

    def notify(self) -> None:
        """Has the task, if it waits, call its `look` again."""
        if self._waiting is not None:
            self._waiting.wake()

    def wait(self, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
        """Calls `look` at once and after each `notify` until it returns something, and returns that; None after
        `timeout` seconds. Raises what `look` raises. Ended."""
        task, end = self._time.running, None if timeout is None else self.clock() + timeout
        assert task is not None
        self._turns = self._turns + 1 if self._turned == self.clock() else 0
        self._turned = self.clock()
        assert self._turns < 10**5, "a main loop turns without end, and no time passes"
        while (answer := look()) is None:
            if end is not None and self.clock() >= end:
                return None
            self._waiting = task
            try:
                task.wait(end)
            finally:
                self._waiting = None
        return answer
