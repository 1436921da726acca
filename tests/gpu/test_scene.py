"""The helper of the GPU tests: a scene in a process of its own is found, runs, and fails loudly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .scene import Place, Pool, ended, program, run_forked, scene

SMALL = Pool(16, 4, given_back=0.0)
kept: list[object] = []


@scene(only="cpu")
@pytest.mark.parametrize("answer", [42])
def test_goes_well(place: Place, answer: int) -> None:
    tensor = torch.full((1000,), answer, device=place.kind)
    assert place.device.block_size(tensor.data_ptr()) >= 4000
    assert place.page == 65536


def goes_wrong(place: Place) -> None:
    raise AssertionError(f"as it should on {place.kind}")


def leaves_something(place: Place) -> None:
    kept.append(place.range(2))


def hangs(place: Place) -> None:
    threading.Event().wait()


def dies(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_skipped(place: Place) -> None:
    pytest.skip(f"{place.kind} cannot")


def test_a_scene_that_is_skipped_says_why() -> None:
    with pytest.raises(pytest.skip.Exception, match="cpu cannot"):
        run_forked(program(is_skipped, "cpu", SMALL))


def test_a_scene_runs_in_a_fork() -> None:
    run_forked(program(test_goes_well, "cpu", SMALL, answer=42))


@pytest.mark.parametrize(
    ("scene", "said", "seconds"),
    [
        (goes_wrong, "exit status 1(?s:.)*as it should on cpu", 900),
        (leaves_something, "exit status 1(?s:.)*'kv': 2", 900),
        (dies, "exit status -9", 900),
        (hangs, "no end within 1 s", 1),
    ],
)
def test_a_scene_that_fails_says_why(scene: Callable[..., None], said: str, seconds: float) -> None:
    with pytest.raises(AssertionError, match=said):
        run_forked(program(scene, "cpu", SMALL), seconds)


# what starts another process and ends, or waits for it: that one writes its pid, keeps the output, and never ends
LAUNCHER = """
import subprocess, sys
child = "import os, sys, time; print('said', os.getpid(), flush=True); time.sleep(1e6)"
started = subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session={apart})
{wait}
"""


@pytest.mark.parametrize("wait", ["", "started.wait()"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_launcher_whose_child_keeps_its_output_is_ended(apart: bool, wait: str) -> None:
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    code = LAUNCHER.format(apart=apart, wait=wait)
    with subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True, **output) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        ended(process, 0.1 if apart else 900)
        assert process.stdout.closed is not apart, "all have ended that kept it"
        if apart:  # nobody ends what has left the session
            os.kill(child, signal.SIGKILL)


def test_a_fork_has_nothing_of_the_one_before() -> None:
    """Not its pool, nor what it was told by the environment, and Ctrl-C interrupts it."""
    run_forked("import os, signal, ballonet; ballonet.install(2**24); os.environ['LEFT'] = 'here'", 900)
    run_forked("import os, ballonet; ballonet.install(2**25); assert 'LEFT' not in os.environ", 900)
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        run_forked("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 900)
