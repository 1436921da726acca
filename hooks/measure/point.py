"""What a forward of a transformers model works on: the point of the performance record that its time belongs to.

Read from shapes alone, on the host: no value on a device is asked for, which would make the host wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ...offload.record.record import Point

_CACHES: Final = ("past_key_values", "cache_params", "state")  # what models call it
_PACKED: Final = ("cu_seq_lens_q", "cu_seqlens_q", "block_table")  # sequences of several lengths in one row


def point_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Point | None:
    """The point of a forward that is called with these arguments; None where they are not those of a model that reads
    tokens in rows.

    Prefill: where nothing is held yet, or several tokens are new: as many as each sequence has new, of an
    encoder-decoder's two sides the longer. Decode: one new token to each, and `length` tokens held.
    """
    for name in _PACKED:
        if kwargs.get(name) is not None:
            return None
    ids, encoded = _given(args, kwargs), 0
    if (decoded := _first(kwargs, "decoder_input_ids", "decoder_inputs_embeds")) is not None:
        ids, encoded = decoded, _encoded(ids, kwargs)
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2 or not ids.shape[0] or not ids.shape[1]:
        return None
    batch, new = ids.shape[0], ids.shape[1]
    cache = _first(kwargs, *_CACHES)
    held = 0 if cache is None else _held(cache)
    if new == 1 and held != 0:
        return Point("decode", batch, held or _masked(kwargs.get("attention_mask")) or 1)
    return Point("prefill", batch, max(new, encoded))


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Tokens [batch, tokens], or what stands for them [batch, tokens, width]."""
    found = _first(kwargs, "input_ids", "inputs_embeds")
    if found is None and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 2:
        return None if args[0].is_floating_point() else args[0]
    return found


def _encoded(ids: Any, kwargs: Mapping[str, Any]) -> int:
    """Tokens on the encoder's side, those that it has read or is to read."""
    outputs = kwargs.get("encoder_outputs")
    states = outputs[0] if outputs else ids
    return states.shape[1] if isinstance(states, torch.Tensor) and states.dim() > 1 else 0


def _held(cache: Any) -> int | None:
    """Tokens in the cache; None where it cannot say without a look at the device, or has no such number."""
    try:
        held = cache.get_seq_length()
    except (AttributeError, ValueError):  # one of states, not of tokens
        return None
    return held if isinstance(held, int) else None


def _masked(mask: Any) -> int:
    """Tokens that attention sees, as the mask is wide; 0 where there is none."""
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return max((each.shape[-1] for each in masks if isinstance(each, torch.Tensor)), default=0)


def _first(kwargs: Mapping[str, Any], *names: str) -> Any:
    for name in names:  # of each token, without a generator
        if (found := kwargs.get(name)) is not None:
            return found
    return None
