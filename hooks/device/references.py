"""Whether other code refers to a tensor, by Python's and torch's reference counts, and where those can be trusted.

Note [Counts of references]
    torch counts references to tensors and to their memory itself, atomically, on every interpreter. Python's count of
    references to an object is exact on CPython up to 3.13 with a GIL. A free-threaded build counts those of each thread
    apart, and may merge them later; from 3.14 on a reference that the interpreter borrows is not counted. Where a count
    may be wrong the answer is "perhaps referenced", which is always safe: a streamed layer is then copied once more.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...allocator.errors import ManageError


@dataclass(frozen=True)
class Interpreter:
    """The properties of the interpreter on which counts depend. `version`: of CPython. `free_threaded`: was it built
    without a GIL? `gil`: has it one now?"""

    version: tuple[int, int]
    free_threaded: bool
    gil: bool
    counts_references: bool = field(init=False)  # exactly, by `sys.getrefcount`

    def __post_init__(self) -> None:
        exact = self.gil and not self.free_threaded and self.version < (3, 14)
        object.__setattr__(self, "counts_references", exact)

    def check(self) -> None:
        """Raises ManageError without the GIL, which the order of hooks and leases between threads relies on."""
        if not self.gil:
            raise ManageError(
                "this Python runs without its GIL, on which the order of forwards and moves between threads relies: "
                "set PYTHON_GIL=1"
            )


THIS: Final = Interpreter(
    sys.version_info[:2],
    free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    gil=getattr(sys, "_is_gil_enabled", lambda: True)(),
)


def perhaps_referenced(held: list[torch.Tensor], interpreter: Interpreter = THIS) -> bool:
    """May there be references to one of these tensors, or to its memory, beside the modules' dictionaries and this
    list? Each tensor is in the list as often as in a dictionary; the caller has no other reference. None of them is a
    wrapper."""
    if not interpreter.counts_references:
        return True
    times: dict[int, int] = {}
    for key in map(id, held):  # in one call, as it runs for each streamed layer of each forward
        times[key] = times.get(key, 0) + 1
    references = list(map(sys.getrefcount, held))
    for tensor, count in zip(held, references, strict=True):
        if count != _ALONE[0] + 2 * (times[id(tensor)] - 1) or tensor._use_count() != 1:  # type: ignore[attr-defined]
            return True
    storages: dict[int, int] = {}
    for tensor in dict(zip(map(id, held), held, strict=True)).values():
        its = tensor.untyped_storage()
        if sys.getrefcount(its) != _ALONE[2]:
            return True
        storages[its._cdata] = storages.get(its._cdata, 0) + 1
    for its_memory, tensors in storages.items():
        if torch._C._storage_Use_Count(its_memory) != _ALONE[1] + tensors - 1:
            return True
    return False


def memory_references(memory: torch.UntypedStorage, interpreter: Interpreter = THIS) -> int:
    """Returns a number that grows with the tensors over this memory and, where Python counts exactly, with references
    to this object, which torch counts as one."""
    count = int(torch._C._storage_Use_Count(memory._cdata))
    return count + sys.getrefcount(memory) if interpreter.counts_references else count


def _alone() -> tuple[int, int, int]:
    """Returns the counts, as taken above, of a tensor that only a dictionary and a list refer to: references to it, and
    to its memory by torch and by Python."""
    kept = {"weight": nn.Parameter(torch.empty(1, device="cpu"), requires_grad=False)}
    held: list[Any] = list(kept.values())
    (count,) = list(map(sys.getrefcount, held))
    its = held[0].untyped_storage()
    return count, torch._C._storage_Use_Count(its._cdata), sys.getrefcount(its)


_ALONE: Final = _alone()


def label(model: object) -> str:
    """Returns a name of the model for messages: the end of the name that it was loaded by, else its class."""
    return Path(str(getattr(getattr(model, "config", None), "name_or_path", ""))).name or type(model).__name__
