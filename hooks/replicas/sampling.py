"""Reproducible sampling: a token that is computed again is the same one, on any replica.

Note [Keyed draws]
    A generator's state depends on all earlier draws, also on those of other requests in the batch. Here each draw is a
    hash of the request's seed and the token's position, as a number u in [0, 1). The token is the first in order of
    rising score at which the cumulative probability passes u. So it depends neither on the batch nor on the number of
    stages, and a token that is computed again after a fault is the same, unless u lies so close to a boundary that the
    rounding of logits decides.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import torch

from .microbatch_plan import Sampling

_KEY: Final = struct.Struct("<qq")
_BITS: Final = struct.Struct("<Q")


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) for the token at a position of a request. `seed`: modulo 2**64."""
    signed = (seed + 2**63) % 2**64 - 2**63
    (bits,) = _BITS.unpack(hashlib.blake2b(_KEY.pack(signed, position), digest_size=8).digest())
    return float(bits >> 11) / float(2**53)


def sample(logits: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Returns a token for each row of `logits`, [rows, vocabulary]: temperature, then top_k, then top_p, as in
    transformers. `positions`: of the returned tokens."""
    logits = logits.float()
    likeliest = logits.argmax(-1)
    drawn = [row for row, each in enumerate(settings) if each.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        chosen = _draw(logits[rows], [settings[row] for row in drawn], [positions[row] for row in drawn])
        likeliest[rows] = chosen
    found: list[int] = likeliest.tolist()
    return found


def _draw(logits: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    scores, order = (logits / column([each.temperature for each in settings], torch.float32)).sort(stable=True)
    vocabulary = scores.shape[-1]
    kept = column([min(each.top_k or vocabulary, vocabulary) for each in settings], torch.int64)
    scores = scores.masked_fill(scores < scores.gather(-1, vocabulary - kept), -torch.inf)
    unlikely = scores.softmax(-1).cumsum(-1) <= 1 - column([each.top_p for each in settings], torch.float32)
    unlikely[:, -1] = False
    mass = scores.masked_fill(unlikely, -torch.inf).double().softmax(-1).cumsum(-1)
    drawn = [uniform(each.seed, position) for each, position in zip(settings, positions, strict=True)]
    threshold = column(drawn, torch.float64) * mass[:, -1:]
    rank = torch.searchsorted(mass, threshold, right=True).clamp(max=vocabulary - 1)
    return order.gather(-1, rank)[:, 0]
