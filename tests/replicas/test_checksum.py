"""Checksums of weights see every byte, and where it is."""

from __future__ import annotations

import torch

from ballonet.hooks.replicas.held_layers import checksum


def test_checksums_see_every_byte_and_where_it_is() -> None:
    generator = torch.Generator().manual_seed(5)
    for nbytes in (1, 7, 8, 4096 * 8, 4096 * 8 + 3, 3 * 4096 * 8 + 77):
        tensor = torch.randint(0, 256, (nbytes,), generator=generator).to(torch.uint8)
        same = checksum(tensor)
        assert checksum(torch.cat([tensor[:1], tensor])[1:]) == same, "at an odd address"
        for at in {0, nbytes // 2, nbytes - 1}:
            other = tensor.clone()
            other[at] ^= 128
            assert checksum(other) != same
            moved = tensor.roll(at or 1)
            assert torch.equal(moved, tensor) or checksum(moved) != same
    rows = torch.randint(-(2**62), 2**62, (256, 4096), generator=generator)  # each a block of its own, or a part of one
    for wide in (rows, rows.view(-1, 1024), rows.view(-1, 256)):
        other = wide.clone()
        other[[0, 1]] = other[[1, 0]]
        assert checksum(other) != checksum(wide)
    one = torch.arange(24.0)
    assert checksum(one.view(4, 6)) != checksum(one.view(6, 4))
    assert checksum(one.view(4, 6).t()) == checksum(one.view(4, 6).t().contiguous())
    assert checksum(one) != checksum(one.view(torch.int32))
    assert checksum(one.to(torch.bfloat16)) != checksum(one)
