"""What the architectures are described with: the smallest sizes at which every part of a model is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

VOCABULARY: Final = 199
LAYERS: Final = 3  # of the plain decoders
TEXT: Final = 190  # the last token that has no meaning of its own
IMAGE: Final = 198  # the token that stands for a piece of an image
PAD: Final = 0
Tensors = Mapping[str, torch.Tensor]


class Architecture(NamedTuple):
    """How to build a model and what it is asked."""

    config: Mapping[str, Any]
    auto: str = "AutoModelForCausalLM"
    model_type: str = ""  # where it is not the name in the table
    prefix: tuple[int, ...] = ()  # tokens that every prompt begins with
    extra: Callable[[int], Tensors] | None = None  # for so many prompts: inputs beside the tokens
    tokens: bool = True  # whether it takes `input_ids`
    refuses: Mapping[str, str] = {}  # mode -> what stock says when it is asked for
    returns_another_cache: bool = False  # whether what `generate()` returns has a stock copy of the cache used


def floats(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(11))


SIZES: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2: Final = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
MULTI_HEAD: Final = SIZES | {"num_key_value_heads": 4}
TWO: Final = SIZES | {"num_hidden_layers": 2}
TWO_HEADED: Final = MULTI_HEAD | {"num_hidden_layers": 2}
HEADS_OF_8: Final = TWO | {"head_dim": 8}
MIXED: Final = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
HYBRID: Final = {"layer_types": ["full_attention", "linear_attention"]}
EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MOE: Final = TWO | EXPERTS
LATENT: Final = TWO_HEADED | {  # keys and values of different width (MLA), and experts
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
BERT: Final = TWO_HEADED | {"is_decoder": True}
GEMMA: Final = HEADS_OF_8 | MIXED
VISION: Final = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "initializer_range": 0.2,
}

STATEFUL: Final = {"assisted": "not supported with stateful models"}
TO_TEXT: Final = "AutoModelForSeq2SeqLM"
FROM_IMAGE: Final = "AutoModelForImageTextToText"
FROM_SPEECH: Final = "AutoModelForSpeechSeq2Seq"


def image(batch: int) -> Tensors:
    return {"pixel_values": floats(batch, 3, 8, 8)}
