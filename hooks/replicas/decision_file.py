"""The file of a controller's log (policy/replicas/decisions.py): written, and read.

Note [Two files]
    A server runs for months, and each replica adds some kilobytes per second. So a file that has reached its size limit
    is renamed, replacing the file before it, and another one is begun: the latest part of the log is kept, between one
    and two times the limit. As long as nothing was replaced, both files together are the whole log, and are read so.
"""

from __future__ import annotations

from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from ...allocator.errors import ManageError
from ...offload.policy.replicas.decisions import Continued, Decision, Entry, Setup, from_line, to_line


class DecisionFile:
    """Writes entries, when called with them. Lines are flushed at once, so they survive the end of the process. Call
    `close` at the end."""

    def __init__(self, path: Path, say: Callable[[str], object], most: int | None = None) -> None:
        """Begins a new file. `say`: called with a line if the log ends early, as a full disk must not end the server;
        `most`: bytes of a file, see Note [Two files]; None: no limit. ManageError where the file cannot be written."""
        self._path = path
        self._say = say
        self._most = most
        self._broken = False
        self._written = 0  # bytes of this file
        self._decisions = 0  # of all files
        self._setup: Setup | None = None
        try:
            self._file = self._opened()
            _earlier(path).unlink(missing_ok=True)
        except OSError as error:
            raise ManageError(f"no log of decisions can be written to {path}: {error.strerror}") from None

    def __call__(self, entry: Entry) -> None:
        """Writes an entry."""
        if self._broken or self._file.closed:
            return
        try:
            if self._most is not None and self._written >= self._most:
                self._rotate()
            self._write(entry)
        except OSError as error:
            self._broken = True
            self._say(f"the log of decisions ends here: {self._path} cannot be written to: {error.strerror}")
        if isinstance(entry, Setup):
            self._setup = entry
        self._decisions += isinstance(entry, Decision)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        try:
            self._file.close()
        except OSError:
            self._broken = True  # buffered bytes cannot be written

    def _opened(self) -> TextIOWrapper:
        return self._path.open("w", encoding="utf-8", buffering=1)

    def _rotate(self) -> None:
        """Renames the file, and begins the next one. OSError."""
        self._file.close()
        self._path.replace(_earlier(self._path))
        self._file, self._written = self._opened(), 0
        self._write(Continued(self._decisions))
        if self._setup is not None:
            self._write(self._setup)

    def _write(self, entry: Entry) -> None:
        self._written += self._file.write(to_line(entry) + "\n")  # characters, which are bytes: JSON escapes others


def read_decisions(path: Path) -> list[Entry]:
    """Returns all remaining entries of a log; the first is a Setup where the log is complete. ManageError where a line
    is no entry; OSError."""
    found = _entries(path)
    if not found or not isinstance(found[0], Continued):
        return found
    earlier = _entries(_earlier(path)) if _earlier(path).exists() else []
    before = sum(isinstance(each, Decision) for each in earlier)
    if earlier and isinstance(earlier[0], Continued):
        before += earlier[0].decisions
    if not earlier or before != found[0].decisions:
        return found
    return [*earlier, *(each for each in found if isinstance(each, Decision))]


def _entries(path: Path) -> list[Entry]:
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(from_line(text))
        except ValueError as error:
            raise ManageError(f"{path}, line {number}: {error}") from None
    return found


def _earlier(path: Path) -> Path:
    """Returns the path of the log's earlier file."""
    return path.with_name(f"{path.name}.1")
