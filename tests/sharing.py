"""Processes that share a budget, for tests, told what to do by lines.

SHARE: bytes, or `true`; KIND: `tensors` or `model`. Lines: `get BYTES` and `drop` of tensors, `say TOKENS` of a model;
each is answered by a line of JSON. Nothing depends on time: whoever is not in the middle of anything is idle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, Self

import pytest

from ballonet.allocator import config

from .gpu.scene import FORKS
from .outside import descriptors

PAGE: Final = 4096
SIZES: Final = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 512}
BEGIN: Final = """
import sys
sys.stdin, sys.stdout = open({}), open({}, "w")
from tests.sharing import main
main(*{})
"""
_NUMBERS = count()


class Process:
    """A process that shares: a fork, as those of `programs`. A context manager: it is dead after it."""

    def __init__(self, share: int | bool, kind: str, folder: Path) -> None:
        """`folder`: of its control socket and the ledger, and of what is told and said."""
        number = next(_NUMBERS)
        pipes = [folder / f"{what}-{number}" for what in ("told", "said")]
        for pipe in pipes:
            os.mkfifo(pipe)
        self._log = log = folder / f"log-{number}"
        log.touch()
        program = BEGIN.format(*map(repr, map(str, pipes)), (json.dumps(share), kind))
        self._fork = FORKS.start(program, {**os.environ, "XDG_RUNTIME_DIR": str(folder)}, log)
        self.pid = self._fork.pid
        self._told, self._said = pipes[0].open("w", buffering=1), pipes[1].open()

    def begin(self, line: str) -> None:
        """Has it do something."""
        self._told.write(f"{line}\n")

    def answer(self) -> Any:
        """What it says once that is done."""
        said = self._said.readline()
        assert said, f"it has ended: {self._log.read_text()}"
        return json.loads(said)

    def do(self, line: str) -> Any:
        """Both."""
        self.begin(line)
        return self.answer()

    def stop(self) -> None:
        """Stops it as SIGSTOP does, which returns before all threads of a process have stopped: waits for them."""
        os.kill(self.pid, signal.SIGSTOP)
        while any(state != "T" for state in self._states()):
            time.sleep(0.001)

    def _states(self) -> Iterator[str]:
        """The state of each thread, as `ps` shows it."""
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                yield (thread / "stat").read_text().rpartition(") ")[2][0]

    def kill(self) -> None:
        """As `kill -9`."""
        self._fork.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._told, self._said):
            with suppress(BrokenPipeError):
                pipe.close()


def share_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process, and what it starts from now on, listen and share budgets in a folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(config, "LEDGERS", folder)


def held(pid: int) -> int:
    """Bytes that the kernel holds for the device of that process; 0 where it has ended."""
    with suppress(OSError):
        return held_by(descriptors(pid, "device"))
    return 0


def held_by(memfds: Sequence[Path]) -> int:
    """The same for a process with these memfds."""
    with suppress(OSError):
        return sum(os.stat(memfd).st_blocks * 512 for memfd in memfds)
    return 0


class Watcher(threading.Thread):
    """Adds up all the time what processes hold. A look counts where a second one at once finds the same: between two
    that differ pages may have moved from one process to another. A context manager."""

    def __init__(self, pids: Sequence[int], total: int) -> None:
        """`total`: bytes that they may hold together; to be changed to more before it is, to less after."""
        super().__init__(daemon=True)
        self.total = total
        self.most = dict.fromkeys(pids, 0)  # bytes that each held
        self._memfds = {pid: descriptors(pid, "device") for pid in pids}
        self.looks = self.over = self.together = 0  # looks, those that found too much; the most bytes of all
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.001):
            self._count()

    def _count(self) -> None:
        """Looks, and once more."""
        before, there = self.total, self._look()
        self.most = {pid: max(most, there[pid]) for pid, most in self.most.items()}
        if there == self._look():
            self.looks += 1
            self.over += sum(there.values()) > max(before, self.total)
            self.together = max(self.together, sum(there.values()))

    def _look(self) -> dict[int, int]:
        """Bytes that each holds."""
        return {pid: held_by(memfd) for pid, memfd in self._memfds.items()}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()
        looks = self.looks
        while self.looks == looks:  # what they hold at the end counts, however late the thread was
            self._count()


def main(share: str, kind: str) -> None:
    from dataclasses import replace

    import torch

    import ballonet
    from ballonet.allocator import devices
    from ballonet.hooks.device import managers, shared
    from ballonet.offload.policy.tuning import DEFAULT

    at_once, small = replace(DEFAULT.pages, idle=0.0), replace(DEFAULT.weights, large=2**11)
    sharing = replace(DEFAULT.sharing, dwell=0.0, patience=30.0, answer=30.0)
    tuning = replace(DEFAULT, pages=at_once, weights=small, sharing=sharing)
    managers.compose_with(managers.Composition(tuning=tuning))
    kept: list[Any] = []
    if kind == "model":
        from .models import build, prompts

        model = build("llama", **SIZES)
        ballonet.install(budget="1GiB", page_size=PAGE, host_budget="64MiB", device="cpu")
        ballonet.manage(model, shared_budget=json.loads(share))
    else:
        ballonet.install(budget="1GiB", page_size=PAGE, host_budget=0, device="cpu")
        shared.join(devices.of(), json.loads(share), 0, 0, sharing)
    for line in chain(("ready",), sys.stdin):
        what, _, count = line.strip().partition(" ")
        said: Any = what
        if what == "get":
            try:
                kept.append(torch.zeros(int(count), dtype=torch.uint8))
            except torch.OutOfMemoryError:
                said = "out of memory"
        elif what == "say":
            said = model.generate(**prompts(2, 16), max_new_tokens=int(count), do_sample=False).tolist()
        elif what == "drop":
            kept.clear()
        print(json.dumps(said), flush=True)
