"""torch's switch of cuDNN's attention, which is off while models decode by pieces (hooks/pieces/calls.py)."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn
from torch.backends import cuda

from ballonet.hooks.pieces import calls as cudnn


@pytest.fixture(autouse=True)
def switch() -> Iterator[None]:
    """The switch of this process, on, as torch has it. Afterwards it is torch's own, and nobody keeps it off."""
    stock = cuda.enable_cudnn_sdp
    stock(True)
    yield
    assert cuda.enable_cudnn_sdp is stock
    assert cudnn._users.users == ()
    stock(True)


def test_attention_of_cudnn_is_off_from_the_first_model_to_the_last() -> None:
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    first, last = map(cudnn.keep_off, models)
    assert not cuda.cudnn_sdp_enabled()
    first()
    first()
    assert not cuda.cudnn_sdp_enabled()
    last()
    assert cuda.cudnn_sdp_enabled()


def test_a_model_that_is_collected_gives_it_back() -> None:
    model = nn.Linear(1, 1)
    cudnn.keep_off(model)
    assert not cuda.cudnn_sdp_enabled()
    del model
    gc.collect()
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("setting", [True, False])
def test_setting_of_the_user_is_obeyed_and_stays(before: bool, setting: bool) -> None:
    cuda.enable_cudnn_sdp(before)
    model = nn.Linear(1, 1)
    restore = cudnn.keep_off(model)
    cuda.enable_cudnn_sdp(setting)
    assert cuda.cudnn_sdp_enabled() is setting
    restore()
    assert cuda.cudnn_sdp_enabled() is setting


def test_a_switch_that_was_off_stays_off() -> None:
    cuda.enable_cudnn_sdp(False)
    model = nn.Linear(1, 1)
    cudnn.keep_off(model)()
    assert not cuda.cudnn_sdp_enabled()


def test_another_wrapper_of_the_switch_stays() -> None:
    stock: Any = cuda.enable_cudnn_sdp
    model, calls = nn.Linear(1, 1), list[bool]()
    restore = cudnn.keep_off(model)
    ours: Any = cuda.enable_cudnn_sdp

    @functools.wraps(ours)
    def theirs(enabled: bool) -> None:
        calls.append(enabled)
        ours(enabled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "enable_cudnn_sdp", theirs)
        restore()
        assert cuda.enable_cudnn_sdp is theirs
        theirs(False)
        assert (calls, cuda.cudnn_sdp_enabled()) == ([False], False)
    cuda.enable_cudnn_sdp = stock


def test_threads_that_manage_and_release_leave_it_as_it_was() -> None:
    def turn(_: int) -> None:
        model = nn.Linear(1, 1)
        for _ in range(50):
            restore = cudnn.keep_off(model)
            assert not cuda.cudnn_sdp_enabled()
            restore()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(turn, range(4)))
    assert cuda.cudnn_sdp_enabled()
