"""The simulated libcudart: torch's way to the device that ballonet reaches by the driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..simgpu.build import build_device

ROOT = Path(__file__).resolve().parents[2]
SCENES = re.findall(r"^def ([a-z]\w+)\(cuda: Runtime\)", (Path(__file__).parent / "runtime_calls.py").read_text(), re.M)


@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str) -> None:
    if "cuda_13" in scene:
        pytest.importorskip("cuda.bindings", "13", reason="the bindings of CUDA 13 are not installed")
    settings = {"GRANULARITY": "64KiB", "MEMORY": "16MiB", "FAULT": "sticky:1" if "stays" in scene else ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.runtime_calls", scene, str(build_device())],
        cwd=ROOT,
        env={**os.environ, **{f"SIMGPU_{name}": value for name, value in settings.items()}},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert ("nothing emulates: some_kernel" in done.stderr) == ("kernel" in scene), done.stderr
