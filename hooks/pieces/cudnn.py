"""cuDNN's attention, off while models decode by pieces.

Note [A switch of the process]
    cuDNN's attention compiles a plan for each new length, 30 to 46 ms of the host, and does not repeat its bits; torch
    prefers it on Hopper. torch's switch is the process's: turned around a call it would change attention that other
    threads compute. So it is off from the first `manage()` with pieces on a GPU to the end of the last, prefill too.
    `torch.backends.cuda.enable_cudnn_sdp` is wrapped meanwhile: what the user sets is obeyed at once, and stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from torch import nn
from torch.backends import cuda

from ...allocator.interrupts import Finalizer
from ...allocator.patches import Seam, Undo


def keep_off(model: nn.Module) -> Callable[[], object]:
    """Turns cuDNN's attention off until the returned idempotent function is called or the model is collected, and so
    for every other model. It is then as it was, or as the user has set it meanwhile."""
    _users.add(id(model), None)
    return Finalizer(model, partial(_users.remove, id(model)))


def _turn_off() -> Iterator[Undo]:
    stock: Any = cuda.enable_cudnn_sdp
    was_on = cuda.cudnn_sdp_enabled()
    set_by_user = False

    @functools.wraps(stock)
    def enable_cudnn_sdp(enabled: bool) -> None:
        nonlocal set_by_user
        stock(enabled)
        set_by_user = True

    def unwrap() -> None:
        if cuda.enable_cudnn_sdp is enable_cudnn_sdp:  # else another wrapper calls it
            cuda.enable_cudnn_sdp = stock

    def turn_on() -> None:
        if was_on and not set_by_user:
            stock(True)

    cuda.enable_cudnn_sdp = enable_cudnn_sdp
    yield unwrap
    yield turn_on
    stock(False)


_users: Final = Seam[None](_turn_off)  # by the id of a live model
