"""A window: a tensor over a range with holes, which pins nothing."""

from __future__ import annotations

import signal
import textwrap

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from ballonet.allocator.errors import BallonetError

from .core import PAGE, opened
from .programs import python


def test_window_shows_mapped_pages_and_pins_none() -> None:
    with opened(budget=4) as core:
        range_ = core.range(8, "kv")
        window = from_dlpack(range_.window(PAGE, 6 * PAGE))
        assert (window.dtype, window.shape, window.data_ptr()) == (torch.uint8, (6 * PAGE,), range_.address + PAGE)
        range_.map(3, 2)
        window[2 * PAGE : 4 * PAGE] = 7
        range_.retire(3, 1)
        core.device.reap(wait=True)
        assert range_.leads_to(3) == "none"
        assert bool((window[3 * PAGE : 4 * PAGE] == 7).all())
        range_.map(3, 1)
        assert window[2 * PAGE : 3 * PAGE].shape == (PAGE,)
        core.device.check()


def test_window_keeps_its_addresses_and_no_page() -> None:
    with opened(budget=4) as core:
        range_ = core.range(4, "kv")
        range_.map(0, 4)
        window = from_dlpack(range_.window(0, 4 * PAGE))
        range_.close()
        core.device.reap(wait=True)
        assert core.pages()["kv"] == 0
        other = core.range(4, "kv")
        assert other.address != window.data_ptr()
        del window


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4 * PAGE + 1), (4 * PAGE, 1), (5 * PAGE, 0)])
def test_window_beyond_its_range_is_refused(offset: int, nbytes: int) -> None:
    with opened() as core:
        range_ = core.range(4, "kv")
        with pytest.raises(BallonetError, match="outside a range"):
            range_.window(offset, nbytes)


def test_a_hole_cannot_be_read() -> None:
    read = """
        from torch.utils.dlpack import from_dlpack
        from tests.core import PAGE, opened
        with opened() as core:
            range_ = core.range(2, "kv")
            range_.map(0, 1)
            window = from_dlpack(range_.window(0, 2 * PAGE))
            print(int(window[0]), flush=True)
            int(window[PAGE])
    """
    done = python("-c", textwrap.dedent(read))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "0\n")
