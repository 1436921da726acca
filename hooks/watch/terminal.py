"""`top` in a terminal: a thread looks at processes, the main thread draws and handles keys; its dialog is pure states,
from one key to the next.

Note [Three threads]
    A process that hangs must not keep `q` from working. So one thread looks, another one changes budgets, which may
    take a minute, and the main one only draws and reads keys. It does not wait for the others at the end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from rich.console import Console
from rich.live import Live

from ...allocator import control
from ...allocator.config import parse_size
from ...allocator.errors import BallonetError, ConfigError
from ...allocator.units import format_size
from .processes import WatchedProcesses, whose
from .view import fitted, screen

UP: Final = "up"
DOWN: Final = "down"
ESCAPE: Final = "escape"
ENTER: Final = "enter"
BACK: Final = "back"
_SEQUENCES: Final = {"\x1b[A": UP, "\x1b[B": DOWN, "\x1bOA": UP, "\x1bOB": DOWN, "\x1b": ESCAPE}
_KEYS: Final = 0.1  # seconds between looks at the keyboard: a key is answered before anybody notices. Chosen
_BUDGET: Final = 60.0  # seconds that a lower budget may take: the default of `ballonet budget`
_SINGLE: Final = {"\r": ENTER, "\n": ENTER, "\x7f": BACK, "\b": BACK}


@dataclass(frozen=True, slots=True)
class Budget:
    """A new budget of a process, in bytes, which the user has confirmed. `device`: the number of its runtime where it
    has several, else None."""

    pid: int
    nbytes: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Dialog:
    """The state of the dialog. `stage`: watching, typing a size, or confirming it. `pid`, `device`, `had`: whose
    budget, and its bytes. `text`: the typed text. `said`: the answer to the last key or change, "" for none. `step`: by
    how many places the choice of a process moves. `done`: has the user quit? `act`: the change to make now."""

    stage: Literal["watch", "type", "confirm"] = "watch"
    pid: int = 0
    device: int | None = None
    had: int = 0
    text: str = ""
    said: str = ""
    step: int = 0
    done: bool = False
    act: Budget | None = None

    @property
    def whose(self) -> str:
        """Names the process and device of the budget, in words."""
        return whose(self.pid, self.device)

    @property
    def footer(self) -> str:
        """The line for the user."""
        if self.stage == "type":
            asked = f"budget of {self.whose}, now {format_size(self.had)}: {self.text}_"
            return f"{asked}   [Enter] go on  [Esc] leave it   {self.said}".rstrip()
        if self.stage == "confirm":
            sizes = f"from {format_size(self.had)} to {format_size(parse_size(self.text))}"
            return f"change the budget of {self.whose} {sizes}?   [y] yes  [n] no"
        return f"[b] budget  [up] [down] process  [q] quit   {self.said}".rstrip()


def pressed(dialog: Dialog, key: str, pid: int | None, budget: int, device: int | None = None) -> Dialog:
    """Returns the state after a key. `pid`, `budget`: of the chosen process, None for none; `device`: the number of the
    chosen device where it has several."""
    now = replace(dialog, step=0, act=None, said="")
    if now.stage == "type":
        return _typed(now, key)
    if now.stage == "confirm":
        watching = Dialog()
        if key in ("y", "Y"):
            size = parse_size(now.text)
            said = f"{now.whose} is asked to have {format_size(size)} ..."
            return replace(watching, act=Budget(now.pid, size, now.device), said=said)
        return replace(watching, said="the budget is as it was") if key in ("n", "N", ESCAPE, "q") else now
    if key == "q":
        return replace(now, done=True)
    if key in (UP, DOWN, "k", "j"):
        return replace(now, step=-1 if key in (UP, "k") else 1)
    if key == "b":
        if pid is None:
            return replace(now, said="there is no process")
        return Dialog("type", pid, device, budget)
    return now


def _typed(now: Dialog, key: str) -> Dialog:
    if key == ESCAPE:
        return Dialog(said="the budget is as it was")
    if key == BACK:
        return replace(now, text=now.text[:-1], said="")
    if key == ENTER:
        try:
            parse_size(now.text, "the budget")
        except ConfigError as error:
            return replace(now, said=str(error))
        return replace(now, stage="confirm", said="")
    return replace(now, text=now.text + key, said="") if len(key) == 1 and key.isprintable() else now


def keys_of(data: str) -> list[str]:
    """Splits a terminal's input into keys."""
    keys = list[str]()
    while data:
        length = next((size for size in (3, 1) if data[:size] in _SEQUENCES and len(data) >= size), 1)
        part, data = data[:length], data[length:]
        keys.append(_SEQUENCES.get(part) or _SINGLE.get(part, part))
    return keys


def usable(console: Console) -> bool:
    """Can the console be drawn on, and does it give keys?"""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdin is not None and sys.stdin.isatty()


class Top:
    """One run of `top`. `processes` has been looked at once."""

    def __init__(self, processes: WatchedProcesses, console: Console, period: float) -> None:
        """`period`: seconds between looks."""
        self._processes = processes
        self._console = console
        self._period = period
        self._dialog = Dialog()
        self._chosen = processes.seen[0].key if processes.seen else None
        self._answers: list[str] = []  # to changes of budgets, not shown yet
        self._looked = threading.Event()
        self._error: BaseException | None = None
        self._end = threading.Event()

    def run(self) -> None:
        """Runs until the user quits, or the one process has ended."""
        threading.Thread(target=self._look, name="ballonet-top", daemon=True).start()
        fd = sys.stdin.fileno()
        try:
            with _ended_well(), _unbuffered(fd), Live(console=self._console, screen=True, auto_refresh=False) as live:
                self._draw(live)
                while not self._dialog.done and not self._processes.ended:
                    if self._step(fd):
                        self._draw(live)
        except KeyboardInterrupt:
            pass
        finally:
            self._end.set()
        if self._error is not None:
            raise self._error
        if self._processes.ended and not self._dialog.done:
            self._console.print(f"process {self._processes.pid} has ended")

    def _step(self, fd: int) -> bool:
        """Waits a moment for keys. Returns whether there is something new to draw."""
        ready, _, _ = select.select([fd], [], [], _KEYS)
        if ready:
            data = os.read(fd, 1024)
            if not data:  # the terminal was closed
                self._dialog = replace(self._dialog, done=True)
            for key in keys_of(data.decode(errors="replace")):
                self._press(key)
        if self._error is not None:
            self._dialog = replace(self._dialog, done=True)
        if self._answers:
            self._dialog = replace(self._dialog, said=self._answers.pop(0))
            return True
        looked = self._looked.is_set()
        self._looked.clear()
        return looked or bool(ready)

    def _press(self, key: str) -> None:
        seen = self._processes.seen
        at = self._place()
        if seen:
            device = seen[at].number if seen[at].one_of_several else None
            self._dialog = pressed(self._dialog, key, seen[at].pid, seen[at].now["budget"], device)
        else:
            self._dialog = pressed(self._dialog, key, None, 0)
        if self._dialog.step and seen:
            self._chosen = seen[(at + self._dialog.step) % len(seen)].key
        if (act := self._dialog.act) is not None:
            threading.Thread(target=self._change, args=(act,), name="ballonet-budget", daemon=True).start()

    def _place(self) -> int:
        """Returns the place of the chosen process in the list; 0 where it has ended."""
        return next((at for at, process in enumerate(self._processes.seen) if process.key == self._chosen), 0)

    def _draw(self, live: Live) -> None:
        width = fitted(self._console.width)
        drawn = screen(self._processes.seen, self._place(), self._dialog.footer, width)
        live.update(drawn, refresh=True)

    def _look(self) -> None:
        while not self._end.wait(self._period) and not self._processes.ended:
            try:
                self._processes.look()
            except BaseException as error:
                self._error = error
                return
            self._looked.set()

    def _change(self, asked: Budget) -> None:
        try:
            now = control.ask(asked.pid, asked.nbytes, _BUDGET, device=asked.device)
        except BallonetError as error:
            self._answers.append(str(error))
        else:
            self._answers.append(f"the budget of {whose(asked.pid, asked.device)} is {format_size(now['budget'])}")


@contextlib.contextmanager
def _ended_well() -> Iterator[None]:
    """A `with` block in which SIGTERM, too, leaves the terminal as it was."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _unbuffered(fd: int) -> Iterator[None]:
    """A `with` block in which keys come one by one and are not echoed; then the terminal is as before."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
