"""The dialog of `top`: pure states, from one key to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ...allocator.config import parse_size
from ...allocator.errors import ConfigError
from ...allocator.units import format_size

UP: Final = "up"
DOWN: Final = "down"
ESCAPE: Final = "escape"
ENTER: Final = "enter"
BACK: Final = "back"
_SEQUENCES: Final = {"\x1b[A": UP, "\x1b[B": DOWN, "\x1bOA": UP, "\x1bOB": DOWN, "\x1b": ESCAPE}
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


def whose(pid: int, device: int | None) -> str:
    """Names a process, and the number of its device where it has several, in words."""
    return f"process {pid}" if device is None else f"device {device} of process {pid}"


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
