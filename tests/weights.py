"""Safetensors files made by hand, so that their tensors lie where a test wants them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final


def header(tensors: Mapping[str, int]) -> dict[str, object]:
    """The header of uint8 tensors of so many bytes, in that order."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, nbytes in tensors.items():
        rows[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [reached, reached + nbytes]}
        reached += nbytes
    return rows


def encoded(rows: object, first: int = 0) -> bytes:
    """The bytes before the data; these begin at `first` modulo 512."""
    text = json.dumps(rows).encode()
    text += b" " * ((first - 8 - len(text)) % 512)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Mapping[str, int], first: int = 0) -> Path:
    """A file of random bytes that is older than now."""
    path.write_bytes(encoded(header(tensors), first) + os.urandom(sum(tensors.values())))
    os.utime(path, ns=(10**18, 10**18))
    return path


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rewritten(path: Path) -> None:
    """The same bytes in the same place."""
    with path.open("r+b") as file:
        file.write(path.read_bytes())


def replaced(path: Path) -> None:
    before = path.stat()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(path.with_suffix(".old").read_bytes())
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))


def removed(path: Path) -> None:
    path.unlink()


# What happens to files while they are in use
CHANGES: Final[Mapping[str, Callable[[Path], None]]] = {
    change.__name__: change for change in (emptied, halved, longer, shorter, rewritten, replaced, removed)
}
