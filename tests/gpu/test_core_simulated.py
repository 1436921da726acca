"""What the simulated device (tests/simgpu) owes to torch: failures are seen, numbers follow seeds, refusals say why."""

from __future__ import annotations

import os
import sys

import pytest

from .scene import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SIMGPU_HOME" not in os.environ, reason="a real GPU, or none: nothing is simulated here"),
]


def program(text: str) -> None:
    run([sys.executable, "-c", "import torch\n" + text])


def test_a_kernel_that_fails_is_seen() -> None:
    program("""
import os

table, index = torch.ones(4, 4, device="cuda"), torch.tensor([9], device="cuda")
torch.nn.functional.embedding(index, table)  # queued: nothing is known yet
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "device-side assert" in str(error), error
else:
    raise SystemExit("nothing was said of a row that is not there")
os._exit(0)  # a process whose device is dead does not end cleanly, on a GPU either
""")


def test_numbers_follow_the_seed_captured_or_not() -> None:
    program("""
def draw(count):
    return [torch.rand(5, device="cuda") for _ in range(count)]

torch.manual_seed(7)
right = draw(3)
assert not torch.equal(right[0], right[1])
torch.manual_seed(7)
assert all(torch.equal(a, b) for a, b in zip(draw(3), right))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    drawn = torch.rand(5, device="cuda")
torch.manual_seed(7)
for each in right:
    graph.replay()
    assert torch.equal(drawn, each)
""")


def test_a_kernel_of_cuda_alone_is_refused_with_a_sentence() -> None:
    program("""
query = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
try:
    torch.ops.aten._scaled_dot_product_flash_attention(query, query, query)
except NotImplementedError as error:
    assert "not emulated" in str(error), error
else:
    raise SystemExit("who computed that?")
""")
