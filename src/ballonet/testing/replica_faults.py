"""Faults for tests: a replica is killed or stopped, cuts a link or damages bytes at a point given in a file.

Note [Points]
    A replica counts its actions by name: `microbatch`, `prefill` and `decode` (before a forward), `hear X` and `say X`
    (a message from or to the supervisor), `send X` and `take X` (a tensor with this tag on a link). The file lists
    faults: at which count of which point, on which replica. It may be rewritten while replicas run; counts then start
    anew. So the same file and the same requests fail a replica at the same place. Replicas without such a file have
    none of this: `attach_faults` is given to hooks/replicas/process.py.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ..hooks.replicas.channel import SupervisorChannel
from ..hooks.replicas.link import Link
from ..hooks.replicas.messages import Message
from ..hooks.replicas.replica_model import RunsLayers
from ..hooks.splice.forms import States

_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
HOW: Final = (*_SIGNALS, "cut", "damage")


@dataclass(frozen=True, slots=True)
class Fault:
    """Replica `member` does `how` (see HOW) at the `count`-th `point`, from 1 on."""

    member: int
    point: str
    count: int
    how: str

    def line(self) -> str:
        """Returns the fault as a line of the file."""
        return f"{self.member}\t{self.point}\t{self.count}\t{self.how}\n"


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Writes the faults for the replicas that were started with this file, replacing earlier ones; empties `done`."""
    done(path).unlink(missing_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(fault.line() for fault in faults))
    new.replace(path)


def done(path: Path) -> Path:
    """Returns the path of the file with the faults that have happened, in order."""
    return path.with_suffix(".done")


class Faults:
    """The faults of one replica. Used by its main loop."""

    def __init__(self, path: Path, me: int) -> None:
        self._path = path
        self._me = me
        self._read: tuple[int, int] | None = None  # inode and time of the file that was read
        self._wanted: dict[tuple[str, int], str] = {}
        self._counts: Counter[str] = Counter()

    def at(self, point: str) -> str | None:
        """Counts a point. Kills or stops the process if such a fault is due; returns any other one, "cut" or "damage";
        None: no fault."""
        self._reload()
        self._counts[point] += 1
        count = self._counts[point]
        how = self._wanted.get((point, count))
        if how is None:
            return None
        with done(self._path).open("a") as file:
            file.write(Fault(self._me, point, count, how).line())
        if how in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[how])
        return how

    def _reload(self) -> None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return
        if (status.st_ino, status.st_mtime_ns) == self._read:
            return
        self._read = status.st_ino, status.st_mtime_ns
        self._counts.clear()
        rows = (line.split("\t") for line in self._path.read_text().splitlines())
        self._wanted = {(point, int(count)): how for member, point, count, how in rows if int(member) == self._me}


class FaultyLayers:
    """A RunsLayers with faults before each forward."""

    def __init__(self, runs: RunsLayers, faults: Faults) -> None:
        self._runs = runs
        self._faults = faults

    def __call__(self, layers: range, given: States | None, inputs: dict[str, Any]) -> States:
        """Runs these layers, see RunsLayers."""
        self._faults.at("microbatch")
        sequences = inputs["cu_seq_lens_q"].numel() - 1 if "cu_seq_lens_q" in inputs else 1
        self._faults.at("prefill" if inputs["position_ids"].numel() > sequences else "decode")
        return self._runs(layers, given, inputs)


class FaultyChannel:
    """A SupervisorChannel with faults when a message is taken, and before one is sent."""

    def __init__(self, supervisor: SupervisorChannel, faults: Faults) -> None:
        self._supervisor = supervisor
        self._faults = faults

    def take(self) -> Message | None:
        """Removes and returns the next message; None where none has come. SupervisorLost."""
        message = self._supervisor.take()
        if message is not None:
            self._faults.at(f"hear {type(message).__name__}")
        return message

    def has(self) -> bool:
        """Returns whether a message has come, or the supervisor is lost."""
        return self._supervisor.has()

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """Returns whether a message of one of these kinds has come. SupervisorLost."""
        return self._supervisor.has_kind(kinds)

    def post(self, *messages: Message) -> None:
        """Sends messages. SupervisorLost."""
        for message in messages:
            self._faults.at(f"say {type(message).__name__}")
        self._supervisor.post(*messages)


class FaultyLink(Link):
    """A Link with faults before a tensor is sent, and after one is taken: the link is cut, while both ends live, or the
    sent bytes are damaged."""

    def __init__(self, faults: Faults, *args: Any, **kwargs: Any) -> None:
        self._faults = faults
        super().__init__(*args, **kwargs)

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False) -> None:
        """Sends a copy of a tensor, see Link."""
        how = self._faults.at(f"send {tag}")
        if how == "cut":
            self._lose("a fault has cut it")
        if how == "damage":
            tensor = tensor.detach().clone()
            tensor.view(torch.uint8).flatten()[0] ^= 1
        super().send(tensor, tag, urgent)

    def take(self, tag: str) -> torch.Tensor | None:
        """Removes and returns the next tensor of this tag, see Link."""
        tensor = super().take(tag)
        if tensor is not None and self._faults.at(f"take {tag}") == "cut":
            self._lose("a fault has cut it")
        return tensor


def attach_faults(
    path: Path, me: int, runs: RunsLayers, supervisor: SupervisorChannel
) -> tuple[RunsLayers, SupervisorChannel, Callable[..., Link]]:
    """Returns what replica `me` runs with, with the faults of a file; see hooks/replicas/process.py."""
    faults = Faults(path, me)
    return FaultyLayers(runs, faults), FaultyChannel(supervisor, faults), partial(FaultyLink, faults)
