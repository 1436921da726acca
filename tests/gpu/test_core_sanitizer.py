"""A small run of everything under compute-sanitizer: no kernel reads or writes where nothing is mapped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .scene import Place, everywhere, play, program, run
from .stock import few_tokens
from .stress import threads_and_streams

# A program of one kernel: where the tool cannot do that much here, it says why.
TRIAL = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
TRIAL_SECONDS, SECONDS = 80, 130


def everything_small(place: Place) -> None:
    """Streams and threads in the heap, then a managed model whose pages move while it generates."""
    threads_and_streams(place, threads=2, operations=60, largest=2**16)
    few_tokens(place, tokens=16)


@everywhere
def test_everything_small(kind: str) -> None:
    if kind == "cpu":
        play(everything_small, kind)
        return
    tool = compute_sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer is not on this machine")
    memcheck = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", sys.executable, "-c"]
    try:
        trial = subprocess.run([*memcheck, TRIAL], capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer takes more than {TRIAL_SECONDS} s for one kernel here")
    if trial.returncode:
        pytest.skip(f"compute-sanitizer cannot run torch here: {(trial.stdout + trial.stderr)[-600:]}")
    run([*memcheck, program(everything_small, "cuda", 128, 32)], SECONDS)


def compute_sanitizer() -> str | None:
    """Where the tool is: in PATH, or with a CUDA toolkit."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    folders = sorted(Path("/usr/local").glob("cuda*"))
    tools = [folder / part / "compute-sanitizer" for folder in folders for part in ("bin", "compute-sanitizer")]
    return next((str(tool) for tool in tools if tool.is_file()), None)
