"""Checksums of weights, to compare their bytes in two places or at two times.

Note [What a checksum sees]
    torch cannot tell whether a weight was written to: writes through `weight.data` are not counted. So the bytes are
    read where they lie: 8-byte words are added up, modulo 2**64, in three ways, by their index modulo two primes and by
    blocks of neighbours. The sums do not depend on the order of additions, and need next to no memory, of which there
    may be none when a layer is to be dropped. They detect any word that differs, and any two that changed places,
    except those that are a multiple of 251 * 257 words apart in one block. They do not detect deliberate manipulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import torch

# Replicas compare sums: these have to be the same on all of them
_PRIMES: Final = (251, 257)
_BLOCKS: Final = 256
_WORD: Final = 8


def checksum(tensor: torch.Tensor) -> bytes:
    """Returns 16 bytes that depend on the dtype, the shape and every byte of a tensor, not on its device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() // _WORD * _WORD
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for part in (*_sums(flat[:whole].view(torch.int64)), flat[whole:]):
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def _sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the sums of int64[n], and the words that fill no row. See Note [What a checksum sees]."""
    for prime in _PRIMES:
        rows = words.numel() // prime * prime
        yield words[:rows].view(-1, prime).sum(0)
        yield words[rows:]
    length = max(1, words.numel() // _BLOCKS)
    blocks = words.numel() // length * length
    yield words[:blocks].view(-1, length).sum(1)
