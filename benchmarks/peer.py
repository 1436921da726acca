"""Peers that need a process each: torch's allocator can be chosen once per process, and each peer has another.

The program that measures starts itself once per peer with `--peer NAME`; there `begin()` answers requests, one line of
JSON each, until its input ends. So every peer keeps its model, and they are measured in turn.

    def main() -> None:
        chosen = begin("decode", __doc__, functions)
        with peers(__file__, chosen, ("native", "ballonet")) as found:
            found["native"].ask("decode", tokens=1024)

    def functions(peer: str, chosen: Options) -> Functions:
        model = ...
        return {"decode": lambda tokens: ...}
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from common import MIB, Figure, Options, interleaved, options

SECONDS = 300.0  # that an answer may take
TAIL = 2000  # characters of what a peer that failed had said
# torch's own allocator with expandable segments, by the environment of a peer
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


Functions = Mapping[str, Callable[..., Any]]  # what a peer answers, by name


class PeerFailed(RuntimeError):
    """A peer raised, died or did not answer."""


class Peer:
    """One process that measures."""

    def __init__(self, program: str, chosen: Options, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        command = [sys.executable, program, "--peer", name, *(["--tiny"] if chosen.tiny else [])]
        self._said = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, what: str, **arguments: Any) -> Any:
        """What the peer's function of that name returns. PeerFailed."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone, and the answer will say so
            self._process.stdin.write(json.dumps([what, arguments]) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {what}{arguments} failed:\n{answer['error']}")
        return answer["result"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            ready = waiting.select(SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        why = f"ended with status {self._process.wait()}" if ready else f"did not answer in {SECONDS:.0f} s"
        self._said.seek(0)
        raise PeerFailed(f"{self.name} {why}:\n{self._said.read()[-TAIL:]}")

    def close(self) -> None:
        """Lets the process end, and ends it where it does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()


@contextmanager
def peers(
    program: str, chosen: Options, names: Sequence[str], environments: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[dict[str, Peer]]:
    """Starts a peer of each name; all start at once. `environments`: variables that some of them get."""
    with ExitStack() as stack:
        found = {name: Peer(program, chosen, name, (environments or {}).get(name, {})) for name in names}
        for peer in found.values():
            stack.callback(peer.close)
        yield found


def in_turns(found: Mapping[str, Peer], repetitions: int, what: str, **arguments: Any) -> dict[str, Figure]:
    """Asks every peer the same, in turn; see `interleaved`."""
    return interleaved({name: partial(peer.ask, what, **arguments) for name, peer in found.items()}, repetitions)


def answering(started: Mapping[str, Peer], needed: Sequence[str], what: str, **arguments: Any) -> dict[str, Peer]:
    """Returns the peers that answer this. Of the others, one that is not needed is left out, with a word why.
    PeerFailed."""
    found = {}
    for name, peer in started.items():
        try:
            peer.ask(what, **arguments)
            found[name] = peer
        except PeerFailed as error:
            if name in needed:
                raise
            print(f"left out: {error}", flush=True)
    return found


def begin(name: str, description: str | None, functions: Callable[[str, Options], Functions]) -> Options:
    """The options of the benchmark of that name. A process that is a peer answers with `functions(peer, chosen)`, or
    with what the link gives, until it is asked no more, and ends."""
    chosen = options(name, description)
    if chosen.peer is None:
        return chosen
    if chosen.peer == "link":
        serve({"about": dict, "link": bandwidth(chosen)})
    else:
        serve(functions(chosen.peer, chosen))
    raise SystemExit


def serve(functions: Functions) -> None:
    """Answers requests until the input ends. What the functions print goes to the errors' side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {"result": functions[what](**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()[-TAIL:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def seconds(device: str, work: Callable[[], object]) -> float:
    """Wall time of `work` with everything that it submits to the device."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: str) -> None:
    """Waits for the device; there is nothing to wait for on a CPU."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


COPIES = 4  # that the link is measured by


def bandwidth(chosen: Options) -> Callable[[], float]:
    """What measures bytes per second that the link gives large copies, the yardstick of what streams: by torch, from
    pinned memory; on the stand-in by its own copies, which are as slow as it was told."""
    nbytes = (16 if chosen.tiny else 256) * MIB
    copy = pinned(nbytes) if chosen.cuda else paged(nbytes)
    return lambda: COPIES * nbytes / seconds(chosen.device, copy)


def pinned(nbytes: int) -> Callable[[], object]:
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return lambda: [target.copy_(source, non_blocking=True) for _ in range(COPIES)]


def paged(nbytes: int) -> Callable[[], object]:
    import ballonet
    from ballonet.allocator import devices
    from ballonet.allocator._native import Transfer

    if devices.current() is None:
        ballonet.install(2 * nbytes, host_budget=2 * nbytes)
    device = devices.require()
    source, target = (device.reserve(nbytes, "weights", device.group()) for _ in range(2))
    source.map_host(0, source.pieces)
    target.map(0, target.pieces)
    transfer = Transfer(device)

    def copy() -> None:
        parts = [(target.address, source.address, nbytes)]
        done = [transfer.copy(parts, after=0, owner="weights", to="device") for _ in range(COPIES)]
        done[-1].wait()

    return copy
