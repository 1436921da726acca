"""Every test is marked cpu or gpu, cpu unless it says otherwise; gpu ones are skipped where no device answers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# A job in the background of a shell ignores Ctrl-C, and so would all processes that tests start, and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Operators of tiny models: a second thread of torch only waits. Read when torch is imported, as it is by some of these.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ballonet
from ballonet.allocator import config, devices
from ballonet.allocator.errors import CompanionUnavailable
from ballonet.allocator.trusted import TrustedFolder

from .core import a_core, a_gate, another_thread  # noqa: F401 (fixtures)
from .pool import take_out, take_out_leftovers
from .tuned import Clock, Tuned, tuning

# Most tests are about what happens when device pages run out. Those about spilling, which hides that, turn it on.
os.environ["BALLONET_SPILL"] = "0"

# Control sockets and ledgers of tests, and of what they start, do not mix with those of the user's own processes. The
# name is short: the path of a socket may have 107 bytes.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="b-")
config.LEDGERS = Path(os.environ["XDG_RUNTIME_DIR"])  # type: ignore[misc]

# What was measured of models on this machine changes what runs do: tests know nothing of it. A folder that stays, as
# what is compiled for torch is kept there, too.
os.environ.setdefault("BALLONET_CACHE_DIR", str(Path(__file__).parent.parent / "build" / "cache"))
with warnings.catch_warnings(action="ignore"):  # of one that was made before, by another umask
    TrustedFolder(Path(os.environ["BALLONET_CACHE_DIR"]))

try:
    import hypothesis
except ModuleNotFoundError:  # a machine that runs only the tests marked gpu, which do without
    pass
else:
    # No deadline: a test is never timed. The machines differ and the first example of a test pays for imports.
    hypothesis.settings.register_profile("ballonet", deadline=None)
    hypothesis.settings.load_profile("ballonet")
    # As bugs are planted: that a test fails is all that is to be known.
    hypothesis.settings.register_profile(
        "planted", deadline=None, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    )


@functools.cache
def no_gpu() -> str:
    """Why there is no NVIDIA device here; empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no device"
    return ""


def pytest_unconfigure() -> None:
    """Removes what processes of tests have left where they listened."""
    shutil.rmtree(config.LEDGERS, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With BALLONET_CHAOS only what is marked for it runs: results that must be the same wherever the pages are."""
    if os.environ.get("BALLONET_CHAOS"):
        left_out = [item for item in items if item.get_closest_marker("counts") or not item.get_closest_marker("chaos")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("release") and not os.environ.get("BALLONET_RELEASE"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-release"))
        if item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.cpu)
        elif reason := no_gpu():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def collections_are_quick() -> None:
    """Modules of torch and transformers, which stay, are not looked through again at every gc.collect() of a test.

    It would take 0.3 s, in hundreds of tests. Whatever a test makes is collected as ever. Nothing is installed before
    the first test of a module.
    """
    take_out_leftovers()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def the_companion_is_compiled() -> None:
    """What is compiled once, and said then, is not said to whichever test comes first."""
    from ballonet.allocator import companion

    with contextlib.suppress(CompanionUnavailable, OSError):  # no compiler; no sources (`make sanitize`)
        companion.build(TrustedFolder(Path(os.environ["BALLONET_CACHE_DIR"])))


@pytest.fixture(autouse=True)
def arguments_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """pytest refers to what the last test of a module was given until the fixtures of the module have ended. They take
    out the pool, in which that may lie; and which test is the last on a worker is chance."""
    yield
    if request.node.funcargs is not None:  # None where the test was interrupted
        request.node.funcargs.clear()


@pytest.fixture(scope="session", autouse=True)
def a_clock_of_their_own() -> Iterator[None]:
    """Next to no time passes for a manager, however long a test takes, unless the test lets it pass: on a loaded
    machine nothing else is decided than on a quiet one."""
    with tuning(clock=Clock(step=1e-6)):
        yield


@pytest.fixture
def tuned() -> Iterator[Tuned]:
    """Gives values to what is composed from now on, until the test ends. See tuned.py."""
    with tuning() as settings:
        yield settings


@pytest.fixture(scope="module", params=[4096], ids=["4KiB"])
def small_pages(request: pytest.FixtureRequest) -> Iterator[int]:
    """A pool whose pages a cache fills many of: each layer has a range of its own. Bytes per page."""
    from .caches import installed

    with installed(request.param) as size:
        yield size


@pytest.fixture(scope="module", params=[65536], ids=["64KiB"])
def large_pages(request: pytest.FixtureRequest) -> Iterator[int]:
    """A pool whose pages most tokens leave as they are: all layers share a range. Bytes per page."""
    from .caches import installed

    with installed(request.param) as size:
        yield size


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Takes the pool out at the end of a test, when no page of KV may be left and the device is whole."""
    yield
    gc.collect()
    try:
        if (runtime := devices.current()) is not None:
            runtime.device.reap(wait=True)
            runtime.device.check()
            assert runtime.device.snapshot()["pages"]["kv"] == 0
    finally:
        take_out()  # or the next test would find it


@pytest.fixture
def restored() -> Iterator[None]:
    """Takes out, at the end of a test, what that has installed."""
    yield
    gc.collect()
    ballonet.restore()
    assert devices.current() is None


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may ask the network."""

    def refuse(*_: object) -> None:
        pytest.fail("something asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Lets go of what the frames of a failure hold once they are in the report: models and caches in them would keep
    the pool in use, and every test after it would fail too."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            frame.f_locals  # noqa: B018  (what was cached of the locals is made anew, of none)
        error = error.__cause__ or error.__context__
    return report
