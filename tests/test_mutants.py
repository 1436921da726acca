"""The patches of `make mutants` fit the sources and name tests that exist; `make mutants` itself takes hours."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from .mutants.patches import Patch, edited, exists, hunks, read, read_all, wrong

PATCHES = read_all()
TABLE = Path(__file__).parent / "mutants" / "README.md"
WELL = """\
Bug: a reader waits for nothing
Tests: tests/test_mutants.py
diff --git a/Makefile b/Makefile
--- a/Makefile
+++ b/Makefile
@@ -1,2 +1 @@
 .DEFAULT_GOAL := help
-.PHONY: help{}
"""


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.area}-{patch.name}")
def test_a_planted_bug_has_its_place(patch: Patch) -> None:
    assert wrong(patch) == ""
    assert patch.simulated == all(test.startswith("tests/gpu/") for test in patch.tests)


def test_bugs_stand_for_kinds_and_are_few() -> None:
    """A patch has to follow every change of the lines around it: what others show need not be planted."""
    assert len(PATCHES) <= 120


def test_names_are_given_once() -> None:
    assert [name for name, count in Counter(patch.name for patch in PATCHES).items() if count > 1] == []


def test_hunks_are_texts() -> None:
    """Hunks of several files, and several of one file; an empty line of context may have lost its blank."""
    diff = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\n@@ -9 +9 @@\n c\n-d\n--- a/y\n+++ b/y\n@@ -1 +1,2 @@\n e\n+f\n"
    assert hunks(diff) == [("x", "a\n\n", "b\n\n"), ("x", "c\nd\n", "c\n"), ("y", "e\n", "e\nf\n")]


def test_what_does_not_fit_is_an_error_that_names_the_file() -> None:
    with pytest.raises(ValueError, match=r"core/lost\.patch: Makefile has 0 times"):
        edited(read("core", "lost", WELL.format(" not as it stands")))
    with pytest.raises(ValueError, match=r"core/bad\.patch: what is 'Device simgpu'"):
        read("core", "bad", "Device simgpu\n" + WELL)
    assert wrong(read("core", "none", "Bug: none\nTests: tests/test_mutants.py\n")).startswith("it needs")
    assert "there is no test tests/absent.py" in wrong(
        read("core", "a", WELL.replace("tests/test_m", "tests/absent.py m"))
    )
    assert not exists("tests/test_mutants.py::test_that_was_" + "deleted")


def test_every_planted_bug_has_a_row() -> None:
    """The table is tests/mutants/README.md, which `python tests/mutants/run.py --table` writes."""
    rows = re.findall(r"^\| (\S+) \| (.*) \| .* \| .* \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    assert [name for name, _ in rows if name != "bug"] == [patch.name for patch in PATCHES]
