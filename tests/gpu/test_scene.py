"""The helper of the GPU tests: a scene in a process of its own is found, runs, and fails loudly."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch

from .scene import Place, program, run


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


kept: list[object] = []


def in_a_process(scene: Callable[..., None], seconds: float, **arguments: object) -> None:
    run([sys.executable, "-c", program(scene, "cpu", 16, 4, **arguments)], seconds)


def test_a_scene_runs() -> None:
    in_a_process(goes_well, 120, answer=42)


@pytest.mark.parametrize(("scene", "said"), [(goes_wrong, "as it should on cpu"), (leaves_something, "'kv': 2")])
def test_a_scene_that_fails_says_why(scene: Callable[..., None], said: str) -> None:
    with pytest.raises(AssertionError, match="exit status 1") as failure:
        in_a_process(scene, 120)
    assert said in str(failure.value)


def test_a_scene_that_hangs_is_ended() -> None:
    with pytest.raises(AssertionError, match="no end within 6 s"):
        in_a_process(hangs, 6)
