"""Tiny decoder-only models of many architectures, random but reproducible, whose tokens depend on what is in the cache.

With the usual `initializer_range` of 0.02 and tied embeddings most tokens of an untrained model are decided by the last
input token alone; so weights are drawn ten times as wide and the head has weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY: Final = 199
LAYERS: Final = 3
PAD: Final = 0

_GPT2: Final = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 512}
_SIZES: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Model type -> its configuration: small, and with attention to everything.
ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"sliding_window": None},
    "qwen2": _SIZES | {"use_sliding_window": False},
    "qwen3": _SIZES | {"head_dim": 12},
    "gemma": _SIZES | {"head_dim": 16},
    "olmo2": _SIZES,
    "granite": _SIZES,
    "phi": _SIZES | {"num_key_value_heads": 4},
    "stablelm": _SIZES,
    "starcoder2": _SIZES | {"sliding_window": None},
    "gpt_neox": _SIZES,
    "opt": _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "codegen": _GPT2 | {"rotary_dim": 4},
    "bloom": {"hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
    "falcon": _SIZES | {"alibi": False, "multi_query": True},
}


def build(model_type: str, **changes: Any) -> Any:
    """The tiny model of that type, in float32 and evaluation mode. `changes` go to its configuration."""
    sizes = dict(ARCHITECTURES[model_type]) | {
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    config = transformers.AutoConfig.for_model(model_type, **(sizes | changes))
    torch.manual_seed(20)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts(batch: int, longest: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of `batch` prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, VOCABULARY, (batch, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        padding = min(longest - 2, 3 * row)
        ids[row, :padding], mask[row, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


# How tokens are chosen -> arguments of `generate()`
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


class Output(NamedTuple):
    """What `generate()` returned: int64[sequences, tokens], and float32[steps, rows, vocabulary]."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def agrees(self, other: Output) -> bool:
        """The same tokens, and logits that differ by no more than another order of additions would explain."""
        return torch.equal(self.tokens, other.tokens) and torch.allclose(
            self.logits, other.logits, rtol=1e-4, atol=1e-4
        )


def generate(model: Any, mode: str, inputs: Mapping[str, torch.Tensor], tokens: int = 14, **more: Any) -> Output:
    """What `model.generate()` returns, seeded."""
    torch.manual_seed(3)
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    result = model.generate(**inputs, **length, **MODES[mode], return_dict_in_generate=True, output_logits=True, **more)
    return Output(result.sequences, torch.stack(result.logits))


Hook = Callable[[int, Any], None]


def before_each_forward(model: PreTrainedModel, act: Hook) -> Any:
    """Calls act(step, cache) before each forward; cache is None where there is none yet. Returns the hook's handle."""
    step = iter(range(10**9))
    return model.register_forward_pre_hook(
        lambda _, args, kwargs: act(next(step), kwargs.get("past_key_values")), with_kwargs=True
    )
