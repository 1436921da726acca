"""The point of the performance record (phase, batch, length) to which a forward of a transformers model belongs.

Read from shapes alone, on the host: reading a value on a device would make the host wait. Most forwards take one
function call, as it runs for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ...offload.record.record import Point
from ..cache_argument import CACHE_NAMES, given_cache

_PACKED: Final = frozenset(("cu_seq_lens_q", "cu_seqlens_q", "block_table"))  # sequences of several lengths in one row


def point_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Point | None:
    """The point of a forward with these arguments; None where they are not those of a model that reads tokens in rows.
    For sequences that are packed into one row the cache knows it (`packed`).

    Prefill: nothing is held yet, or several tokens are new; `length` is the new tokens of each sequence, of an
    encoder-decoder's two sides the longer. Decode: one new token each, and `length` tokens held.
    """
    given: dict[str, Any] = {}
    for name, value in kwargs.items():
        if value is not None:
            given[name] = value
    if not _PACKED.isdisjoint(given):
        return getattr(given_cache(given), "point", None)
    ids, encoded = given.get("input_ids", given.get("inputs_embeds")), 0
    if ids is None and args:
        first = args[0]  # tokens, [batch, tokens], or something else
        ids = first if isinstance(first, torch.Tensor) and first.dim() == 2 and not first.is_floating_point() else None
    if (decoded := given.get("decoder_input_ids", given.get("decoder_inputs_embeds"))) is not None:
        ids, encoded = decoded, _encoded(ids, given)
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2 or not ids.shape[0] or not ids.shape[1]:
        return None
    batch, new = ids.shape[0], ids.shape[1]
    held: int | None = 0
    for name in CACHE_NAMES:  # `given_cache` without its call
        if (cache := given.get(name)) is not None:
            try:
                held = cache.get_seq_length()
            except (AttributeError, ValueError):  # one of states, not of tokens
                held = None
            held = held if isinstance(held, int) else None  # only the device knows it
            break
    if new == 1 and held != 0:
        return Point("decode", batch, held or _masked(given.get("attention_mask")) or 1)
    return Point("prefill", batch, max(new, encoded))


def packed(sequences: Sequence[tuple[int, int]]) -> Point | None:
    """The point of a batch of sequences, each (new tokens, tokens held); None without sequences.

    Decode where each has one new token: `length` is the mean of the tokens held, so that the work is that of all of
    them. Prefill where any has more: all new tokens count, as those of one sequence.
    """
    if not sequences:
        return None
    if all(new == 1 for new, _ in sequences):
        held = sum(held for _, held in sequences)
        return Point("decode", len(sequences), max(1, -(-held // len(sequences))))
    return Point("prefill", 1, sum(new for new, _ in sequences))


def _encoded(ids: Any, given: Mapping[str, Any]) -> int:
    """Tokens on the encoder's side, those that it has read or is to read."""
    outputs = given.get("encoder_outputs")
    states = outputs[0] if outputs else ids
    return states.shape[1] if isinstance(states, torch.Tensor) and states.dim() > 1 else 0


def _masked(mask: Any) -> int:
    """Tokens that attention sees: the width of the mask, 0 where there is none."""
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return max((tensor.shape[-1] for tensor in masks if isinstance(tensor, torch.Tensor)), default=0)
