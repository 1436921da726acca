"""Who else refers to a tensor, on interpreters that count references and on those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ballonet.allocator.errors import ManageError
from ballonet.hooks.device.references import THIS, Interpreter, perhaps_referenced

EXACT = pytest.mark.skipif(not THIS.counts_references, reason="this interpreter does not count exactly")


@pytest.mark.parametrize(
    ("interpreter", "exact"),
    [
        (Interpreter((3, 11), free_threaded=False, gil=True), True),
        (Interpreter((3, 13), free_threaded=False, gil=True), True),
        (Interpreter((3, 14), free_threaded=False, gil=True), False),
        (Interpreter((4, 0), free_threaded=False, gil=True), False),
        (Interpreter((3, 13), free_threaded=True, gil=True), False),
        (Interpreter((3, 13), free_threaded=True, gil=False), False),
    ],
)
def test_counts_are_believed_where_they_are_exact(interpreter: Interpreter, exact: bool) -> None:
    assert interpreter.counts_references == exact
    if not exact:
        assert perhaps_referenced([nn.Parameter(torch.ones(2))], interpreter)


def test_without_the_gil_nobody_knows_who_is_in_a_forward() -> None:
    Interpreter((3, 13), free_threaded=True, gil=True).check()
    with pytest.raises(ManageError, match="PYTHON_GIL=1"):
        Interpreter((3, 13), free_threaded=True, gil=False).check()


@EXACT
@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda weight: None, id="nobody"),
        pytest.param(lambda weight: weight, id="the object"),
        pytest.param(lambda weight: weight.data, id="data"),
        pytest.param(lambda weight: weight[1:], id="a view"),
        pytest.param(lambda weight: weight.detach().numpy(), id="numpy"),
        pytest.param(lambda weight: weight * 2, id="a graph"),
        pytest.param(lambda weight: weight.untyped_storage(), id="memory"),
    ],
)
def test_whoever_could_write_is_seen(look: Callable[[torch.Tensor], object]) -> None:
    module = nn.Linear(3, 2)
    kept = look(module.weight)
    assert perhaps_referenced(list(module._parameters.values())) == (kept is not None)  # type: ignore[arg-type]


@EXACT
def test_tensors_that_share_memory_or_stand_twice_are_their_own() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    both = torch.ones(2, 2, 2)
    first.weight, second.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    del both
    modules = [first, second]
    assert not perhaps_referenced([module._parameters["weight"] for module in modules])  # type: ignore[misc]
    second.weight = first.weight
    assert not perhaps_referenced([module._parameters["weight"] for module in modules])  # type: ignore[misc]
    kept = first.weight
    assert perhaps_referenced([module._parameters["weight"] for module in modules])  # type: ignore[misc]
    del kept
