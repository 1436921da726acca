"""A small run of everything under compute-sanitizer: no kernel reads or writes where nothing is mapped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .scene import Place, Pool, program, run
from .stock import few_tokens
from .stress import threads_and_streams

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
    tool = next((each for each in tools if each and Path(each).is_file()), None)
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
