"""The Llama shapes that are measured, with random weights, and the peers that hold one: stock and managed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from common import Options
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import ballonet


def sized(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int, **more: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        **more,
    )


EIGHT_B = sized(4096, 14336, 32, 32, 8, 128256, 131072, tie_word_embeddings=False)
SMALL = sized(576, 1536, 30, 9, 3, 49152, 32768)  # that of SmolLM2-135M
TINY = sized(64, 96, 2, 4, 2, 199, 1024)
LARGER = sized(256, 1024, 6, 4, 2, 199, 32768)  # the smallest whose layers can stream: a matrix of each is 1 MiB

LARGER_HALF = sized(256, 2048, 6, 4, 2, 199, 32768)  # the same in bfloat16


def shape(chosen: Options) -> LlamaConfig:
    """What is measured here: the largest that the kind of device can do in minutes."""
    return TINY if chosen.tiny else EIGHT_B if chosen.cuda else SMALL


def streamable(chosen: Options) -> LlamaConfig:
    """The same with layers that can stream."""
    return shape(chosen) if not chosen.tiny else LARGER_HALF if chosen.cuda else LARGER


def few(chosen: Options, layers: int) -> LlamaConfig:
    """Returns so many layers of the 8B shape on a GPU, elsewhere of the smallest that can stream."""
    config = copy.deepcopy(EIGHT_B if chosen.cuda and not chosen.tiny else LARGER)
    config.num_hidden_layers = layers
    return config


def build(config: LlamaConfig, device: str) -> PreTrainedModel:
    """The model, made on the device: bfloat16 on a GPU, float32 on a CPU. Seeded, so that peers have the same one."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def prepare(peer: str, chosen: Options) -> PreTrainedModel:
    """The model of a peer; "ballonet" installs the pool first and manages it."""
    if peer == "ballonet":
        ballonet.install("60GiB" if chosen.cuda else "4GiB")
    model = build(shape(chosen), chosen.device)
    if peer == "ballonet":
        ballonet.manage(model)
    return model


def filled(
    peer: str, config: Any, batch: int, tokens: int, device: str, cache: DynamicCache | None = None
) -> DynamicCache:
    """A cache of random keys and values for so many tokens, the peer's own kind, or this one. A prefill would give it
    in minutes."""
    room: dict[str, Any] = {"config": config}
    if cache is None:
        cache = ballonet.KVCache(**room, max_length=2 * tokens) if peer == "ballonet" else DynamicCache(**room)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    head = config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        states = torch.randn(batch, config.num_key_value_heads, tokens, head, dtype=dtype, device=device)
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)
    return cache
