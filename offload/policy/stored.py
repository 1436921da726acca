"""Which files of stored prefixes go when a folder is full, and whether reading some is worth it. Pure.

A run of blocks is of no use without those before it, so its uses count for them as well: what goes first is the file
whose last use, and that of all that continue it, is the longest ago, and of equals the one furthest from the beginning
of its prompt. So nothing that is left continues what is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A run of blocks of a chain. `keys`: of the blocks, in order; `after`: of the block before them, empty where they
    begin the prompt; `salt`: what the keys are for (model, dtype, adapter, ...)."""

    salt: bytes
    after: bytes
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file. `used`: its last use, ns. `part`: None where its content is not known here."""

    name: str
    inode: int
    nbytes: int
    used: int
    part: StoredPart | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds for tokens of a prompt: to read them from files (`disk`) and copy them to the device (`link`), or to
    `compute` them. None where not measured."""

    disk: float | None
    link: float | None
    compute: float | None

    @property
    def worth(self) -> bool:
        """Is reading worth it? True also where either is not known."""
        return self.disk is None or self.compute is None or self.disk + (self.link or 0.0) <= self.compute


def reading(nbytes: int, tokens: int, *, disk: float | None, link: float | None, per_token: float | None) -> Reading:
    """Returns the seconds of reading and of computing files of so many bytes with so many tokens. `disk`, `link`: bytes
    per second; `per_token`: seconds in which one is computed, in a prefill of many."""
    return Reading(
        None if disk is None else nbytes / disk,
        None if link is None else nbytes / link,
        None if per_token is None else tokens * per_token,
    )


def before(files: Iterable[Stored], part: StoredPart) -> list[Stored]:
    """Iterates over the files that a run continues, as far as they are there: the one just before it, the one before
    that, ..."""
    return _before(_by_key(files), part)


def leaving(files: Collection[Stored], excess: int, kept: Collection[str] = ()) -> list[Stored] | None:
    """Returns the files to remove, in this order, so that so many bytes go: none that is `kept` (by name). None where
    that is not possible."""
    holders = _by_key(files)
    used = {file.name: file.used for file in files}
    depth = dict.fromkeys(used, 0)
    for file in files:
        continued = _before(holders, file.part) if file.part is not None else []
        depth[file.name] = len(continued)
        for other in continued:
            used[other.name] = max(used[other.name], file.used)
    gone = []
    for file in sorted(files, key=lambda file: (used[file.name], -depth[file.name], file.name)):
        if excess > 0 and file.name not in kept:
            gone.append(file)
            excess -= file.nbytes
    return gone if excess <= 0 else None


def _by_key(files: Iterable[Stored]) -> dict[tuple[bytes, bytes], Stored]:
    return {(file.part.salt, key): file for file in files if file.part is not None for key in file.part.keys}


def _before(holders: Mapping[tuple[bytes, bytes], Stored], part: StoredPart) -> list[Stored]:
    chain: list[Stored] = []
    reached = holders.get((part.salt, part.after))
    while reached is not None and reached.part is not None and reached not in chain:
        chain.append(reached)
        reached = holders.get((reached.part.salt, reached.part.after))
    return chain
