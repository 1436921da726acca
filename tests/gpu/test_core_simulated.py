"""What the simulated device (tests/simgpu) owes to torch: failures are seen, numbers follow seeds, refusals say why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .scene import ROOT, run

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
torch.cuda.synchronize()  # torch sets the offset of a capture to 0 on its stream, for which no replay waits
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


OF_ALL_KINDS = """
import os, sys, time, torch
def test_passes(): assert torch.ones(3, device="cuda").sum().item() == 3
def test_passes_with_torch_alone(): assert "ballonet" not in sys.modules
def test_ends_its_process(): os._exit(3)
def test_hangs(): time.sleep(600)
def test_passes_after_them(): test_passes()
"""


def test_torchs_suite_is_compared_though_some_tests_crash_or_hang(tmp_path: Path) -> None:
    file, report = tmp_path / "test_cuda.py", tmp_path / "report.json"
    file.write_text(OF_ALL_KINDS)
    command = [sys.executable, ROOT / "tests" / "simgpu" / "torch_suite.py", file, "--limit", "10", "--report", report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(
        "3 of 5 pass with torch's allocator\n2 of 3 pass with ballonet's allocator\n"
        "passes with torch's allocator only: test_cuda.py::test_passes_with_torch_alone\n    failed: AssertionError"
    )
    outcomes = [said[0] for said in json.loads(report.read_text())["torch"].values()]
    assert sorted(outcomes) == ["crashed", "hung", "passed", "passed", "passed"]
