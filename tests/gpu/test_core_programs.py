"""Programs on a device: a notebook, the preflight, and a small run of everything under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ballonet.allocator import device_choice
from ballonet.allocator.config import Config
from ballonet.allocator.preflight import run as preflight

from .scene import Place, Pool, everywhere, execute, program, run
from .stock import few_tokens
from .stress import threads_and_streams

NOTEBOOK = """
import contextlib, io, os
os.environ.update(BALLONET_DEVICE="{device}", BALLONET_BUDGET="64MiB", BALLONET_PAGE_SIZE="2MiB")
from IPython.core.interactiveshell import InteractiveShell
import torch
import ballonet
shell = InteractiveShell()
shell.run_line_magic("load_ext", "ballonet")
kept = torch.ones(2**18, device="{device}")
with contextlib.redirect_stdout(io.StringIO()) as said:
    shell.run_line_magic("unload_ext", "ballonet")
assert "ballonet: unloaded; models are as they were. T" in said.getvalue(), "the pool stays, and why"
os.environ["BALLONET_BUDGET"] = "48MiB"
shell.run_line_magic("load_ext", "ballonet")
assert ballonet.stats().budget == 48 * 2**20, ballonet.stats().budget
assert float(kept.sum()) == 2**18
"""


@everywhere
def test_a_pool_that_stayed_gets_the_budget_that_is_asked_for(kind: str) -> None:
    """`%load_ext` and `%unload_ext`, where torch cannot return to its own allocator."""
    pytest.importorskip("IPython")
    execute(NOTEBOOK.format(device=kind), kind)


@pytest.mark.gpu
def test_the_driver_s_probes_answer() -> None:
    names = ("granularity", "host_pages", "copies", "several_handles", "graphs", "torch_graphs")
    report = preflight.preflight(device_choice.choose(Config(device="cuda")), names)
    assert {name: probe["status"] for name, probe in report["probes"].items()} == dict.fromkeys(names, "answered")
    assert report["settings"] == {}, report["reasons"]
    assert report["probes"]["graphs"]["facts"]["another_page"] is True
    assert report["probes"]["torch_graphs"]["facts"]["on_host"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["hostnuma", "sticky:3"])
def test_fault_of_the_simulated_driver_is_gone_round(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "SIMGPU_HOME" not in os.environ:
        pytest.skip("only the simulated device has faults that can be planted")
    target = device_choice.choose(Config(device="cuda"))
    monkeypatch.setenv("SIMGPU_FAULT", fault)
    assert preflight.preflight(target, ("host_pages",))["settings"] == {"host_pages": False}


# A program of one kernel: where the tool cannot do that much here, it says why.
TRIAL = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
TRIAL_SECONDS, SECONDS = 80, 130


def everything_small(place: Place) -> None:
    """Streams and threads in the heap, then a managed model whose pages move while it generates."""
    threads_and_streams(place, threads=2, operations=60, largest=2**16)
    few_tokens(place, tokens=16)


@pytest.mark.gpu
def test_everything_small() -> None:
    tools = [
        shutil.which("compute-sanitizer"),
        *map(str, sorted(Path("/usr/local").glob("cuda*/**/compute-sanitizer"))),
    ]
    tool = next((path for path in tools if path and Path(path).is_file()), None)
    if tool is None:
        pytest.skip("compute-sanitizer is not on this machine")
    memcheck = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", sys.executable, "-c"]
    try:
        trial = subprocess.run([*memcheck, TRIAL], capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer takes more than {TRIAL_SECONDS} s for one kernel here")
    if trial.returncode:
        pytest.skip(f"compute-sanitizer cannot run torch here: {(trial.stdout + trial.stderr)[-600:]}")
    run([*memcheck, program(everything_small, "cuda", Pool(128))], SECONDS)
