"""Helpers of tests that start processes of replicas."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final

ENVIRONMENT: Final = {"BALLONET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait(until: Callable[[], object], failed: Callable[[], object] = lambda: None) -> None:
    """Returns once that is so; how long that takes is not judged. `failed`: what is said where it will not come; None
    while it may."""
    while not until():
        why = failed()
        assert why is None, why
        time.sleep(0.01)
