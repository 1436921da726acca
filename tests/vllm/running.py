"""Processes of vLLM, which have a Python of their own, as tests start and watch them from outside.

vLLM is no dependency: `make test-vllm` makes an environment with it, and says so here by BALLONET_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import pytest

PYTHON = os.environ.get("BALLONET_VLLM_PYTHON", "")
NEEDS_VLLM = pytest.mark.skipif(not PYTHON, reason="needs vLLM in an environment of its own: make test-vllm")
ENGINE = Path(__file__).parent / "engine.py"
PAGE = 2**16
MIB = 2**20
UNDER = 1200  # seconds, on a machine that is busy


def engine(model: Path, folder: Path, options: dict[str, Any] | None) -> list[str]:
    """The command of engine.py, which writes what it answers to `answers.json` in the folder."""
    return [PYTHON, str(ENGINE), str(model), str(folder / "answers.json"), json.dumps(options)]


def asked(model: Path, folder: Path, options: dict[str, Any] | None) -> dict[str, Any]:
    """What engine.py answers."""
    subprocess.run(engine(model, folder, options), check=True, timeout=UNDER, cwd=folder)
    return answered(folder)


def answered(folder: Path) -> dict[str, Any]:
    """What an engine that has ended wrote to the folder."""
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


def budget(*arguments: object) -> Any:
    """What `ballonet budget` says, as a user asks it."""
    command = [sys.executable, "-m", "ballonet", "budget", *map(str, arguments), "--timeout", f"{UNDER}s", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * UNDER).stdout)


class Led:
    """An engine whose waves of requests the test begins. A context manager: it has ended well after it."""

    def __init__(self, model: Path, folder: Path, options: dict[str, Any]) -> None:
        """`folder`: to be made; `options`: of engine.py."""
        folder.mkdir()
        command = engine(model, folder, {**options, "led": True})
        self.folder = folder
        self.waves: list[int] = []  # that it was asked for
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def begin(self, wave: int | None = None) -> None:
        """Begins that wave; None: the one after the last."""
        assert self._process.stdin is not None
        self.waves.append(max(self.waves, default=-1) + 1 if wave is None else wave)
        self._process.stdin.write(f"{self.waves[-1]}\n")

    def end(self) -> None:
        """Waits until the wave is done, or before the first one the engine is there."""
        assert self._process.stdout is not None
        late = threading.Timer(UNDER, self._process.kill)
        late.start()
        try:
            if not any(line.startswith("done") for line in self._process.stdout):
                pytest.fail("the engine has ended too early, or took too long")
        finally:
            late.cancel()

    def close(self) -> dict[str, Any]:
        """What it has answered, at its end."""
        self._process.communicate(timeout=UNDER)
        assert self._process.returncode == 0
        return answered(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
