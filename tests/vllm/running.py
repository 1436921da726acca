"""Processes of vLLM, which have a Python of their own, as tests start and watch them from outside.

vLLM is no dependency: `make test-vllm` makes an environment with it, and says so here by BALLONET_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from ..replicas.fleet import memfd_bytes

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
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def change_budget(pid: int, nbytes: int) -> dict[str, Any]:
    """Gives the process another budget as a user does; returns what the command says."""
    command = [sys.executable, "-m", "ballonet", "budget", str(pid), str(nbytes), "--timeout", f"{UNDER}s", "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * UNDER)
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def held(pid: int) -> int:
    """Bytes that the kernel holds for the device of that process; 0 where it has none or has ended."""
    with suppress(OSError):
        return memfd_bytes(pid, "device")
    return 0


class Watcher(threading.Thread):
    """Adds up all the time what several processes hold. A context manager."""

    def __init__(self, pids: Sequence[int], allowed: int) -> None:
        """`allowed`: bytes that they may hold together. To be changed to more before the processes know, to less
        after."""
        super().__init__(daemon=True)
        self.allowed = allowed
        self.most = dict.fromkeys(pids, 0)  # bytes that each held
        self.together = 0  # bytes, the most of all
        self.looks = self.over = 0  # looks, and those that found too much
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.001):
            before = self.allowed
            there = {pid: held(pid) for pid in self.most}
            self.looks += 1
            self.over += sum(there.values()) > max(before, self.allowed)
            self.together = max(self.together, sum(there.values()))
            self.most = {pid: max(most, there[pid]) for pid, most in self.most.items()}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()
