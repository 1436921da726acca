"""A file that the log of a controller is written to, or read from (policy/replicas/decisions.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...allocator.errors import ManageError
from ...offload.policy.replicas.decisions import Entry, from_line, to_line


class DecisionFile:
    """Call it with each entry. Lines are written at once, so they are there whatever ends the process; a replica adds
    some hundred bytes a second. Call `close` at the end."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        """Begins a new file. `say`: with why it ends early, as a full disk ends no server. ManageError where there can
        be no such file."""
        self._path = path
        self._say = say
        self._broken = False
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ManageError(f"no log of decisions can be written to {path}: {error.strerror}") from None

    def __call__(self, entry: Entry) -> None:
        """Writes an entry."""
        if self._broken or self._file.closed:
            return
        try:
            self._file.write(to_line(entry) + "\n")
        except OSError as error:
            self._broken = True
            self._say(f"the log of decisions ends here: {self._path} cannot be written to: {error.strerror}")

    def close(self) -> None:
        """Idempotent."""
        try:
            self._file.close()
        except OSError:
            self._broken = True  # what is left cannot be written either


def read_decisions(path: Path) -> list[Entry]:
    """All entries of a file. ManageError where a line is none; OSError."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(from_line(text))
        except ValueError as error:
            raise ManageError(f"{path}, line {number}: {error}") from None
    return found
