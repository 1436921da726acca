"""Scenes: functions that show something under an installed pool, on a GPU or on the host stand-in.

torch changes its CUDA allocator once per process, so on a GPU every scene has a process of its own. On the stand-in it
runs in the process of the tests, which puts torch's allocator back afterwards. A scene that works on both shows here
that its own code is right, and on the GPU that the GPU is.

    @scene(pages=128)
    def test_something_holds(place: Place) -> None: ...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import ballonet
from ballonet.allocator import _native, devices, findings
from ballonet.allocator._native import Device, Range
from ballonet.allocator.config import Config, cache_dir

from ..pool import take_out
from .forked import Forks

if TYPE_CHECKING:
    from ballonet.allocator._native import Owner

ROOT = Path(__file__).parents[2]
SECONDS = 900  # that a scene may take: only one that hangs takes them, also on a simulated GPU beside other work
GIVEN_BACK = 10.0  # seconds in which what a scene no longer uses is given back
PAGES = {"cuda": 2 * 2**20, "cpu": 65536}  # bytes of a page
KEPT = ("BALLONET_CACHE_DIR", "BALLONET_LIBCUDA", "BALLONET_SPILL")  # settings that a scene's process shares
TAIL = 6000  # characters of what a scene that failed had said
SKIPPED = "the scene is skipped: "  # what a process says before the reason
UINT8 = (1, 8)  # DLPack's code and bits
# For a program of `python -c`: in it `tests` is this folder, whatever else is installed under that name.
PRELUDE = f"""
import sys, types
tests = sys.modules["tests"] = types.ModuleType("tests")
tests.__path__ = [{str(ROOT / "tests")!r}]
"""

FORKS = Forks(PRELUDE, ROOT)  # the processes of scenes on a simulated GPU

CPU, CUDA = pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)
everywhere = pytest.mark.parametrize("kind", [CPU, CUDA])


class Lane:
    """A stream; on a CPU, where an operator is complete when it returns, nothing."""

    def __init__(self, device: Device, known: bool = True) -> None:
        """`known`: to the pool, before it has been used."""
        self.stream: Any = torch.cuda.Stream() if device.kind == "cuda" else None
        if self.stream is not None and known:
            device.note_stream(self.stream.cuda_stream)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """What is submitted inside goes to the stream."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    @property
    def handle(self) -> int:
        """To the driver; 0 on a CPU."""
        return 0 if self.stream is None else int(self.stream.cuda_stream)

    def done(self) -> bool:
        """All that it has been given so far?"""
        return self.stream is None or bool(self.stream.query())

    def follow(self, other: Lane | None = None) -> None:
        """What comes next waits for what `other` (None: the current stream) has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream() if other is None else other.stream)

    def lead(self) -> None:
        """The current stream waits for what this one has been given so far."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def uses(self, tensor: torch.Tensor) -> None:
        """The tensor's memory is not given to others before what this stream has been given so far is done."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


class Captured:
    """A CUDA graph of some work, and the tensors that it writes; on a CPU the work is done again instead."""

    def __init__(self, place: Place, work: Callable[[], tuple[torch.Tensor, ...]], pool: Any = None) -> None:
        """`pool`: shared with a graph that was captured before."""
        self._work = work
        self._graph: Any = None
        if not place.cuda:
            self.outputs = work()
            return
        warm = place.lane()  # kernels are loaded, and workspaces made, before the capture
        warm.follow()
        with warm():
            for _ in range(3):
                work()
        warm.lead()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.outputs = work()

    @property
    def pool(self) -> Any:
        """The pool of the graph's memory."""
        return None if self._graph is None else self._graph.pool()

    def launch(self) -> None:
        """Does the work again. On a GPU nothing is allocated for that."""
        if self._graph is not None:
            self._graph.replay()
        else:
            for old, new in zip(self.outputs, self._work(), strict=True):
                old.copy_(new)

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Clears what the work writes, does it again, and returns copies."""
        for output in self.outputs:
            output.zero_()
        self.launch()
        return tuple(output.clone() for output in self.outputs)


@dataclass
class Place:
    """The installed pool of a scene."""

    kind: str  # torch's name of the device: "cpu" or "cuda"
    device: Device

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def page(self) -> int:
        """Bytes"""
        return self.device.page_size

    @property
    def places(self) -> tuple[Literal["device", "host"], ...]:
        """Where a page can be."""
        return ("device", "host") if self.device.host_pages else ("device",)

    def range(self, pieces: int, owner: Owner = "kv", mapped: bool = True) -> Range:
        made = self.device.reserve(pieces * self.page, owner, self.device.group())
        if mapped:
            made.map(0, pieces)
        return made

    def lane(self, known: bool = True) -> Lane:
        return Lane(self.device, known)

    @property
    def current(self) -> int:
        """The handle of the current stream; 0 on a CPU."""
        return torch.cuda.current_stream().cuda_stream if self.cuda else 0

    def pages(self, owner: str) -> int:
        count: int = self.device.snapshot()["pages"][owner]
        return count

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """What nothing uses goes back to the driver. torch says so on a GPU only."""
        if self.cuda:
            torch.cuda.empty_cache()
        else:
            self.device.trim()

    def sleep(self) -> None:
        """Half a second of work for the current stream."""
        if self.cuda:
            torch.cuda._sleep(1_000_000_000)


def device_bytes() -> int:
    """Memory of the GPU, by the driver: this process makes no context on it."""
    driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceTotalMem_v2(ctypes.byref(size), 0) == 0
    return size.value


def over(held: Range, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of that shape at the start of the range, over exactly the pages that it needs."""
    nbytes = math.prod(shape) * dtype.itemsize
    return from_dlpack(held.tensor(0, (nbytes,), (1,), *UINT8)).view(dtype).view(shape)


@dataclass(frozen=True)
class Pool:
    """What a scene's pool has."""

    pages: int = 64
    host_pages: int = 32  # where the device can map them
    peer: str = "none"
    peer_pages: int = 1
    spill: bool = False
    given_back: float = GIVEN_BACK


def scene(*, only: str = "", needs_host: bool = False, **pool: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a scene: on the stand-in and on a GPU, or on the `only` kind of both. `pool`: fields of Pool.
    `needs_host`: it is skipped where the device maps no host pages. Its other parameters are the test's."""

    def made(played: Callable[..., None]) -> Any:
        def test(kind: str, **arguments: Any) -> None:
            if needs_host and kind == "cuda" and (reason := no_host_pages()):
                pytest.skip(reason)
            play(played, kind, **pool, **arguments)

        functools.update_wrapper(test, played, updated=())
        parameters = [parameter for name, parameter in inspect.signature(played).parameters.items() if name != "place"]
        kind = inspect.Parameter("kind", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        attributes = vars(test)
        attributes["__signature__"] = inspect.Signature([kind, *parameters])
        attributes["scene"] = played  # for a process of its own, which finds it by the name of the test
        attributes["pytestmark"] = getattr(played, "pytestmark", [])
        kinds = [kind for kind in (CPU, CUDA) if only in ("", kind.values[0])]
        return pytest.mark.parametrize("kind", kinds)(test)

    return made


@functools.cache
def no_host_pages() -> str:
    """Why the GPU's scenes have no host pages; empty where they have."""
    facts = _native.probe("libcuda.so.1", 0)
    if not facts["host_pages"]:
        return "this device cannot map host pages"
    findings_kept = findings.load(cache_dir(Config.from_env()), findings.key_of(facts))
    if findings_kept is None or findings_kept.settings.get("host_pages", True):
        return ""
    return f"a preflight turned host pages off: {findings_kept.reasons['host_pages']}"


def play(scene: Callable[..., None], kind: str, /, **arguments: Any) -> None:
    """Runs the scene under a pool; fails with what it said. `arguments`: fields of Pool, and what goes to the scene."""
    pool = Pool(**{size.name: arguments.pop(size.name) for size in fields(Pool) if size.name in arguments})
    if kind == "cpu":
        act(scene, kind, pool, arguments)
        return
    execute(program(scene, kind, pool, **arguments), kind)


def execute(code: str, kind: str) -> None:
    """Runs Python in a process of its own; fails with what it said. A real driver is not forked."""
    if kind == "cpu" or "SIMGPU_HOME" in os.environ:
        run_forked(code)
    else:
        run([sys.executable, "-c", code])


def program(scene: Callable[..., None], kind: str, pool: Pool, **arguments: Any) -> str:
    """Python that runs the scene."""
    call = (scene.__module__, scene.__name__, kind, arguments)
    return f"{PRELUDE}from tests.gpu.scene import Pool, enter; enter(*{call!r}, {pool!r})"


def environment() -> dict[str, str]:
    """What a scene's process finds in it. Kernels are loaded at the start: the driver may wait for all that runs before
    it loads one, so that the first use of a kernel would wait for what a scene holds. And streams have connections of
    their own: two that share one wait for each other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BALLONET_") or name in KEPT}
    defaults = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONFAULTHANDLER": "1"}
    return defaults | kept


def run(command: list[str], seconds: float = SECONDS) -> None:
    """A process of its own, from the root; fails with the end of what it said, also where it does not end."""
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **output) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            said, status = ended(process), None
        except KeyboardInterrupt:  # benchmarks/run.py has no more time for it
            pytest.exit(f"interrupted in a scene\n{ended(process)[-TAIL:]}")
    judge(status, said, seconds)


def ended(process: subprocess.Popen[str], patience: float = 5.0) -> str:
    """Ends a process that does not end by itself, and those that it started. What they said, and where each of their
    threads was. `patience`: seconds that they have for that, twice."""
    said: bytes | None = None
    for number in (signal.SIGABRT, signal.SIGKILL):  # at the first Python's faulthandler prints the stacks
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=patience)[0]
        except subprocess.TimeoutExpired as error:
            said = error.output  # bytes, as not all has come
    return (said or b"").decode(errors="replace")  # what has left the session still keeps the pipe


def run_forked(code: str, seconds: float = SECONDS) -> None:
    """Python in a process of its own that need not import torch; fails as `run` does."""
    judge(*FORKS.run(code, environment(), seconds), seconds)


def judge(status: int | None, said: str, seconds: float) -> None:
    """Fails where a process that said this did not end, or not well; skips where its scene was skipped."""
    if status == 0 and SKIPPED in said:
        pytest.skip(said.rpartition(SKIPPED)[2].strip())
    ending = f"no end within {seconds:.0f} s" if status is None else f"exit status {status}"
    assert status == 0, f"{ending}\n{said[-TAIL:]}"


def enter(module: str, name: str, kind: str, arguments: dict[str, Any], pool: Pool) -> None:
    """In the process of its own: finds the scene and runs it."""
    member = getattr(importlib.import_module(module), name)
    try:
        act(getattr(member, "scene", member), kind, pool, arguments)
    except pytest.skip.Exception as why:
        print(f"\n{SKIPPED}{why}", flush=True)


def settled(device: Device, seconds: float) -> dict[str, Any]:
    """What the device has once nothing is used any more, or after so many seconds: another thread may just be giving
    the last of it back."""
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        device.synchronize()
        device.reap(wait=True)
        device.check()
        left = device.snapshot()
        if left["pages"]["weights"] == left["pages"]["kv"] == 0 or time.monotonic() > end:
            return left
        time.sleep(0.01)


def act(scene: Callable[..., None], kind: str, pool: Pool, arguments: dict[str, Any]) -> None:
    page, threads = PAGES[kind], torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(1)  # tiny operators: a second thread only waits
    ballonet.install(
        pool.pages * page,
        page_size=page,
        host_budget=pool.host_pages * page,
        peer=pool.peer,
        peer_budget=pool.peer_pages * page,
        spill=pool.spill,
        device=kind,
    )
    device = devices.require()
    assert device.kind == ("cuda" if kind == "cuda" else "standin")
    try:
        scene(Place(kind, device), **arguments)
        left = settled(device, pool.given_back)
        assert left["pages"]["weights"] == left["pages"]["kv"] == 0, (
            f"pages that nothing uses any more: {left['pages']}"
        )
        assert left["created"] <= pool.pages
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors, and the pool would stay for the next test
        raise
    finally:
        if kind == "cpu":
            ballonet.restore()
            torch.set_num_threads(threads)
    if kind == "cpu":
        take_out()
