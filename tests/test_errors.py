"""The typed errors: what they say, what they are, and that they survive the way between processes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import ballonet
from ballonet.allocator import errors
from ballonet.allocator.errors import (
    BallonetError,
    BudgetError,
    ControlRefused,
    DriverError,
    NoSuchProcess,
    PoolExhausted,
    SLOError,
    TraceError,
)

WITH_FIELDS = [
    (
        BudgetError(3 * 2**30, 2**30, 3 * 2**30 + 4096),
        "the weights take 3GiB of pages, and a forward needs room beside them, but the budget is 1GiB (1073741824 ",
    ),
    (DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN"), "cuMemMap failed with CUDA_ERROR_UNKNOWN (999)"),
    (
        DriverError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY", "lower the budget"),
        "cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2): lower the budget",
    ),
    (TraceError("t.csv", 3, "size is '-5'"), "t.csv:3: size is '-5'"),
    (TraceError("t.csv", 0, "cannot be read"), "t.csv: cannot be read"),
    (
        SLOError("it is too short", 0.0058122, 2**30 + 1),
        "it is too short. What would do: an SLO of 5.813 ms, or a budget of 1GiB (ballonet.set_budget(1073741825))",
    ),
    (SLOError("it is too short", None, None), "it is too short"),
    (NoSuchProcess(7, "does not exist"), "process 7 does not exist"),
    (ControlRefused(7, "the budget is too small", "BudgetError"), "process 7 refused: the budget is too small"),
]


@pytest.mark.parametrize(("error", "text"), WITH_FIELDS, ids=lambda value: type(value).__name__)
def test_messages_and_fields_survive_pickling(error: BallonetError, text: str) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error).startswith(text)
    assert vars(again) == vars(error)


def test_all_are_ballonet_errors_but_the_one_for_memory() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert {value for value in classes if not issubclass(value, BallonetError)} == {PoolExhausted}
    assert issubclass(BallonetError, RuntimeError)
    assert issubclass(PoolExhausted, MemoryError)


# Where users look

ROOT = Path(__file__).parent.parent
SOURCES = [path for room in ("allocator", "offload", "hooks", "src/ballonet") for path in (ROOT / room).rglob("*.py")]


def typed(sources: list[str]) -> set[str]:
    """Names of the classes that derive from BallonetError, in whatever module, and of PoolExhausted."""
    classes = [found for text in sources for found in re.findall(r"^class (\w+)\(([^)]*)\)", text, re.MULTILINE)]
    bases = {name: {*re.split(r"\W+", above)} for name, above in classes}
    names = {"BallonetError", "PoolExhausted"}
    while more := {name for name, above in bases.items() if above & names} - names:
        names |= more
    return names


def test_every_typed_error_that_is_written_about_can_be_imported_from_the_package() -> None:
    sources = [path.read_text() for path in SOURCES]
    documents = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    docstrings = [found for text in sources for found in re.findall(r'"""(.*?)"""', text, re.DOTALL)]
    text = "\n".join(documents + docstrings)
    told = {name for name in typed(sources) if re.search(rf"\b{name}\b", text)}
    assert told >= {"BudgetInUse", "SLOError", "WeightsFileChanged", "CompanionUnavailable"}
    assert {name for name in told if not issubclass(getattr(ballonet, name, int), BaseException)} == set()
    assert {name for name in re.findall(r"\bballonet\.([A-Z]\w+)", text) if not hasattr(ballonet, name)} == set()
