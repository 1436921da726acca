"""The memory that gloo uses lies outside the pool, whose pages move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.hooks.replicas.link import host_buffer, staged, unstaged

from ..pool import covered, mapped, take_out


@pytest.fixture
def pool() -> Iterator[None]:
    ballonet.install(budget="64MiB")
    yield
    take_out()


def in_pool(tensor: torch.Tensor) -> bool:
    return covered(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, mapped())


@pytest.mark.usefixtures("pool")
def test_staged_bytes_and_room_for_what_arrives_lie_outside_the_pool() -> None:
    tensor = torch.randn(100, 1000).to(torch.bfloat16)
    assert in_pool(tensor)
    copy = staged(tensor)
    copy.wait()
    arrived = host_buffer(copy.data.numel(), pinned=False)
    assert not in_pool(copy.data)
    assert not in_pool(arrived)
    arrived.copy_(copy.data)
    room = unstaged(arrived, "bfloat16", (100, 1000))
    assert torch.equal(room, tensor)
    del tensor, room


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_staged_in_the_order_of_its_stream() -> None:
    tensor = torch.zeros(2**24, device="cuda")
    for value in range(8):
        tensor.fill_(value)
        copy = staged(tensor)
        tensor.fill_(-1)  # after the copy, on the same stream
        copy.wait()
        assert copy.data.is_pinned()
        assert unstaged(copy.data, "float32", (2**24,)).unique().tolist() == [value]
