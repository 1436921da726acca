"""Checksums of weights, which say whether bytes in two places, or at two times, are the same.

Note [What a checksum sees]
    torch cannot tell whether a weight was written to: what is written through `weight.data` is counted nowhere. So the
    bytes are looked at, where they lie: the sums of rows and of columns of 8-byte words, modulo 2**64. That is
    one pass at the bandwidth of the memory, without temporaries of the weights' size, in whatever order a device adds,
    and any one word, row or column that differs is seen. It is no protection against whoever means to go unseen.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch

_WORDS: Final = 4096  # in a row: replicas compare sums, so that all have the same
_WORD: Final = 8


def checksum(tensor: torch.Tensor) -> bytes:
    """Returns 16 bytes that depend on the dtype, the shape and every byte of a tensor, wherever it lies."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() // _WORD
    words, rest = flat[: whole * _WORD].view(torch.int64), flat[whole * _WORD :]
    rows = whole // _WORDS * _WORDS
    table, last = words[:rows].view(-1, _WORDS), words[rows:]
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for part in (table.sum(0), table.sum(1), last, rest):
        found.update(part.cpu().numpy().tobytes())
    return found.digest()
