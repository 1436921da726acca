"""New keys and values of prompts on their way to the host, beside the computation of the layers that follow (eLLM
§4.3.2).

Note [Full blocks]
    A prompt that is admitted with its KV on the host has pages there. Kernels could write to them, and attention read
    them back, but the layer would wait for the link both times. So the device's copy engine copies new KV that fills
    whole blocks, once the layer has computed it, while this and the next layer go on; kernels write these rows to the
    padding's sector, and attention gets them from the layer itself. Rows behind the last full block of a prompt, and
    single tokens that follow later, are written by kernels.

Note [One layer in flight]
    Before a layer uses the cache its stream waits for the copies of the layer before it. So the copies need no more
    memory than the admission has charged as staging: one layer's new KV. Later work on that stream comes after the
    copies, and pages do not leave their addresses before the streams of copies have passed
    (allocator/csrc/mapping/copies.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...allocator._native import Done, Transfer
from ...allocator.errors import BallonetError


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block that a batch fills. `row`: of its first token among the new ones; `place`: of that token in the cache;
    `read`: among the tokens that attention reads, None where those are the new ones."""

    row: int
    place: int
    read: int | None


class HostWrites:
    """The copies of one cache. Used by the computing thread; other threads only wait for them."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._flying: tuple[Done, Sequence[torch.Tensor]] | None = None  # (copies, tensors that they read)

    def write(
        self,
        caches: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
        blocks: Sequence[NewBlock],
        tokens: int,
        stream: int,
    ) -> None:
        """Copies blocks of so many `tokens` of a layer, after the work of `stream`, the current one, and fills them in
        where attention reads. Keys and values of each: `caches` [tokens of the cache, heads, dim], `new` [rows, heads,
        dim], `read` [tokens that are read, heads, dim]. Where the driver refuses, that stream writes them."""
        new = [each.contiguous() for each in new]
        parts = []
        for cache, states, found in zip(caches, new, read, strict=True):
            size, to, of = states[0].nbytes, cache.data_ptr(), states.data_ptr()
            for block in blocks:
                parts.append((to + block.place * size, of + block.row * size, tokens * size))
                if block.read is not None:
                    found[block.read : block.read + tokens] = states[block.row : block.row + tokens]
        try:
            self._flying = self._transfer.copy(parts, after=stream, owner="kv", to="host"), new
        except BallonetError:
            for cache, states in zip(caches, new, strict=True):
                for block in blocks:
                    cache[block.place : block.place + tokens] = states[block.row : block.row + tokens]

    def arrive(self, stream: int | None) -> None:
        """Makes `stream`, for None the host, wait for the copies. DriverError."""
        if (flying := self._flying) is not None:
            done, _ = flying
            done.wait() if stream is None else done.before(stream)
            if stream is not None:
                self._flying = None
