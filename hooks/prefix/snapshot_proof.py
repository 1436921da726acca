"""Does a model go on from a recurrent state where several tokens follow?

Note [Ignored]
    Every model goes on from a state token by token, as `generate()` could not work otherwise. But for several tokens at
    once the code of some (Mamba's first version and its derivatives, in transformers 5.23 without its kernels) begins
    with an empty state, whatever the cache holds, so that stock gives other results with a cache held by hand than
    without. Nothing tells that in advance. So before a state is used for the first time, a few tokens are computed
    behind one, and behind the same with other numbers in it. If no logit changes, the state was not read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ...offload.policy.tuning import DEFAULT
from ..compat import DynamicCache, LinearAttentionLayer, cache_name

_KINDS: Final = ("conv_states", "recurrent_states")


def goes_on(model: Any, prompt: Sequence[int], tokens: tuple[int, int] = DEFAULT.prefixes.proof) -> bool:
    """Do tokens depend on the state before them? Runs the model on the first tokens of a prompt, four times at most:
    `tokens` are those of the state, and those computed behind it."""
    begun_with, more = tokens
    some = [prompt[n % len(prompt)] for n in range(begun_with + more)]
    ids = torch.tensor([some], device=model.device)
    begun = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        _logits(model, ids[:, :begun_with], begun)
        want = _logits(model, ids[:, begun_with:], copy.deepcopy(begun))
        for kind in _KINDS:
            other = copy.deepcopy(begun)
            held = [getattr(layer, kind) for layer in other.layers if isinstance(layer, LinearAttentionLayer)]
            if _doubled(held) and torch.equal(_logits(model, ids[:, begun_with:], other), want):
                return False
    return True


def _logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    output: Any = model(input_ids=ids, use_cache=True, return_dict=True, **{cache_name(model): cache})
    logits: torch.Tensor = output.logits
    return logits


def _doubled(held: Sequence[Mapping[int, torch.Tensor | None]]) -> bool:
    """Doubles all numbers in place. Returns whether there were any."""
    tensors = [each for states in held for each in states.values() if each is not None]
    for each in tensors:
        each.add_(each).add_(1)
    return bool(tensors)
