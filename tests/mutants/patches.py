"""The planted bugs as they are stored: one file `AREA/NAME.patch` per bug, beside this module.

A file begins with a header, one `Key: value` a line, and goes on with a unified diff of the sources (`git diff`, -p1):

    Bug: what the bug makes wrong, in one line
    Tests: the tests that fail with it, the quickest first, separated by spaces
    Device: simgpu                only where the tests need a GPU: they run on the simulated one,
    Delay: 50000                  with this many ns before each of its operations,
    Seed: 1                       and with this seed
    Survives: why no test can fail with it; only where that is known

The lines of a hunk are looked for as a text, wherever they stand: the line numbers of a diff are not read. They have to
stand in the file exactly once, so a hunk has as much context as that takes, and no more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "mutants"
KEYS = ("Bug", "Tests", "Device", "Delay", "Seed", "Survives")
NATIVE = (".cpp", ".h")


class Edit(NamedTuple):
    """One hunk: `old` stands in the file `path`, which is relative to the project, and becomes `new`."""

    path: str
    old: str
    new: str


class Patch(NamedTuple):
    area: str
    name: str
    header: dict[str, str]
    edits: tuple[Edit, ...]

    @property
    def bug(self) -> str:
        return self.header.get("Bug", "")

    @property
    def tests(self) -> list[str]:
        return self.header.get("Tests", "").split()

    @property
    def survives(self) -> str:
        return self.header.get("Survives", "")

    @property
    def simulated(self) -> bool:
        """Whether its tests run on the simulated GPU."""
        return self.header.get("Device") == "simgpu"

    @property
    def native(self) -> bool:
        """Whether the native core has to be compiled for it."""
        return any(edit.path.endswith(NATIVE) for edit in self.edits)


def read_all() -> list[Patch]:
    """All planted bugs, by area and name."""
    return [read(file.parent.name, file.stem, file.read_text("utf-8")) for file in sorted(HERE.glob("*/*.patch"))]


def read(area: str, name: str, text: str) -> Patch:
    """The bug that a file describes. ValueError where a line of it is not understood."""
    head, _, diff = text.partition("\n--- ")
    header = {}
    for line in head.splitlines():
        key, colon, value = line.partition(": ")
        if colon and key in KEYS:
            header[key] = value.strip()
        elif line and not line.startswith(("diff --git ", "index ")):
            raise ValueError(f"{area}/{name}.patch: what is {line!r}?")
    return Patch(area, name, header, tuple(hunks(f"--- {diff}")) if diff else ())


def hunks(diff: str) -> list[Edit]:
    """The hunks of a unified diff, in their order."""
    edits, path, old, new = [], "", [""], [""]
    for line in [*diff.splitlines(keepends=True), "@@"]:
        if line.startswith(("@@", "--- ", "diff ")) and (old or new) and path:
            edits.append(Edit(path, "".join(old), "".join(new)))
        if line.startswith("+++ "):
            path = line.split()[1].removeprefix("b/")
        if line.startswith(("@@", "--- ", "+++ ", "diff ", "index ", "\\")):
            if not line.startswith("\\"):
                old, new = [], []
            continue
        if line[0] in " -\n":  # editors take the blank off an empty line of context
            old.append(line[1:] or line)
        if line[0] in " +\n":
            new.append(line[1:] or line)
    return edits


def edited(patch: Patch, root: Path = ROOT) -> dict[str, str]:
    """The files that the bug changes, by their path, as they are with it. ValueError where it has no place."""
    texts: dict[str, str] = {}
    for path, old, new in patch.edits:
        text = texts.get(path) or (root / path).read_text("utf-8")
        if (count := text.count(old)) != 1:
            raise ValueError(f"{patch.area}/{patch.name}.patch: {path} has {count} times:\n{old}")
        texts[path] = text.replace(old, new)
    return texts


def wrong(patch: Patch) -> str:
    """What is wrong with the file; empty where nothing is."""
    if not patch.bug or not patch.tests or not patch.edits:
        return "it needs a line `Bug:`, a line `Tests:` and a diff"
    if missing := [test for test in patch.tests if not exists(test)]:
        return f"there is no test {' '.join(missing)}"
    try:
        edited(patch)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def exists(test: str) -> bool:
    """Whether the file of a test is there and names its classes and functions; its parameters are not looked at."""
    path, *names = test.partition("[")[0].split("::")
    file = ROOT / path
    text = file.read_text("utf-8") if file.is_file() else ""
    return bool(text) and all(re.search(rf"\b{name}\b", text) for name in names if name != "runTest")
