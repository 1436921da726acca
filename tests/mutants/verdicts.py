"""What was found of each planted bug: build/mutants.json for this machine, and README.md here for a reader.

A verdict is stored under a hash of the bug and of its tests, so that what was judged is not judged again as long as
both are as they were.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

from patches import HERE, ROOT, Patch

STORED = ROOT / "build" / "mutants.json"
TABLE = HERE / "README.md"
SCENES = ("tests/gpu/scene.py", "tests/gpu/hold.py")  # which all tests on the simulated device are made of
HEADER = """\
# Planted bugs

Each stands for a kind: memory with two owners or with none, a change that is half undone, bytes of another owner, what
a GPU needs (a fence, a wait, a `record_stream`, a lease, a rule of captures), or for a row of `test_rows.py`: what a
paper claims, done otherwise. `make mutants` plants it in a copy of the project; a test that passes without it has to
fail with it. A bug is a patch, `AREA/NAME.patch`; `patches.py` has the format. Those of `simgpu` are tested on the
simulated device ([tests/simgpu](../simgpu/README.md)). `python tests/mutants/run.py --table` writes this file.
"""
COLUMNS = "| bug | what it makes wrong | killed by | how it shows |\n|---|---|---|---|\n"
UNJUDGED = "not judged yet"


class Verdict(NamedTuple):
    by: str  # the test that failed; empty where none did
    said: str  # one line of its message


def key_of(patch: Patch) -> str:
    """What its verdict depends on: the bug, and its tests as they are."""
    files = sorted({*(test.partition("::")[0] for test in patch.tests), *(SCENES if patch.simulated else ())})
    settings = [patch.header.get(key) for key in ("Device", "Delay", "Seed")]
    parts = [repr((patch.edits, patch.tests, settings)), *((ROOT / file).read_text("utf-8") for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def known() -> dict[str, Verdict]:
    """What earlier runs found, by key."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    return {key: Verdict(*fields) for key, fields in stored.items()}


def store(key: str, verdict: Verdict) -> None:
    STORED.write_text(json.dumps({**known(), key: verdict}, indent=1))


def table(patches: list[Patch]) -> str:
    """The text of README.md. A bug that was not judged on this machine keeps its row of the present table, as
    long as that names one of its tests."""
    verdicts, text = known(), HEADER
    rows = dict(re.findall(r"^\| (\S+) \| .*? (\| .* \| .*) \|$", TABLE.read_text("utf-8"), re.MULTILINE))
    for area in sorted({patch.area for patch in patches}):
        text += f"\n## {area}\n{COLUMNS}"
        for patch in patches:
            if patch.area == area:
                verdict = verdicts.get(key_of(patch))
                ends = shown(patch, verdict) if verdict else rows.get(patch.name, "")
                named = [test for test in patch.tests if f"`{short(test)}`" in ends]
                ends = ends if verdict or named or (ends and patch.survives) else f"| - | {UNJUDGED}"
                text += f"| {patch.name} | {plain(patch.bug)} {ends} |\n"
    return text


def shown(patch: Patch, verdict: Verdict) -> str:
    """The last two columns of its row."""
    by = f"`{short(verdict.by)}`" if verdict.by else "-"
    return f"| {by} | {plain(verdict.said or patch.survives or '**it lives**')}"


def short(test: str) -> str:
    return test.removeprefix("tests/")


def plain(text: str) -> str:
    """The text as a cell of a table."""
    return text.replace("|", "/").replace("<", "&lt;")
