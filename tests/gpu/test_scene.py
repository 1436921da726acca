"""The helper of the GPU tests: a scene in a process of its own is found, runs, and fails loudly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from .scene import Place, program, run, run_forked


def goes_well(place: Place, answer: int) -> None:
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


kept: list[object] = []


Way = Callable[..., None]


def of_its_own(scene: Callable[..., None], seconds: float, **arguments: object) -> None:
    run([sys.executable, "-c", program(scene, "cpu", 16, 4, **arguments)], seconds)


def forked(scene: Callable[..., None], seconds: float, **arguments: object) -> None:
    run_forked(program(scene, "cpu", 16, 4, **arguments), seconds)


both = pytest.mark.parametrize("way", [of_its_own, forked])


@both
def test_a_scene_runs(way: Way) -> None:
    way(goes_well, 120, answer=42)


@both
@pytest.mark.parametrize(
    ("scene", "ending", "said"),
    [
        (goes_wrong, "status 1", "as it should on cpu"),
        (leaves_something, "status 1", "'kv': 2"),
        (dies, "status -9", ""),
    ],
)
def test_a_scene_that_fails_says_why(way: Way, scene: Callable[..., None], ending: str, said: str) -> None:
    with pytest.raises(AssertionError, match=f"exit {ending}") as failure:
        way(scene, 120)
    assert said in str(failure.value)


@both
def test_a_scene_that_hangs_is_ended(way: Way) -> None:
    with pytest.raises(AssertionError, match="no end within 6 s"):
        way(hangs, 6)


def test_a_fork_has_nothing_of_the_one_before() -> None:
    """Not its pool, nor what it was told by the environment, and Ctrl-C interrupts it."""
    run_forked("import os, signal, ballonet; ballonet.install(2**24); os.environ['LEFT'] = 'here'", 120)
    run_forked("import os, ballonet; ballonet.install(2**25); assert 'LEFT' not in os.environ", 120)
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        run_forked("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 120)
