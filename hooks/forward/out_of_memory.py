"""What an out-of-memory error says beside the core's words: changes with which that forward would have had room.

Note [When it is asked]
    The core words the error where no Python may run (heap_report.cpp), and most programs that catch one never read it.
    So what would help is worked out when the message is read, from sizes that were noted when it was raised. The
    message is a str whose text grows then; code that looks into it without `str()`, as accelerate does into `args`,
    sees the core's words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch

Ask = Callable[[], Sequence[str]]


class Message(str):
    """The core's words, and after the first `str()` what `ask` returns, too. Pickled as the text."""

    _ask: Ask | None
    _text: str

    def __new__(cls, words: str, ask: Ask) -> Self:
        made = super().__new__(cls, words)
        made._ask, made._text = ask, words
        return made

    def __str__(self) -> str:
        ask, self._ask = self._ask, None
        if ask is not None and (changes := ask()):
            self._text = f"{self._text}. By a plan of this forward it fits with {', or '.join(changes)}"
        return self._text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def explain(error: torch.OutOfMemoryError, ask: Ask) -> None:
    """Makes the error's message say what would help. Idempotent."""
    if error.args and isinstance(error.args[0], str) and not isinstance(error.args[0], Message):
        error.args = (Message(error.args[0], ask), *error.args[1:])
