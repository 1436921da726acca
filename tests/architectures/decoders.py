"""Decoders of text whose cache is made of layers of attention."""

from __future__ import annotations

from typing import Final

from .base import (
    BERT,
    GEMMA,
    GPT2,
    HEADS_OF_8,
    LATENT,
    MIXED,
    MOE,
    MULTI_HEAD,
    SIZES,
    TWO,
    TWO_HEADED,
    VOCABULARY,
    Architecture,
)

_SHARED_KV: Final = {
    "num_hidden_layers": 4,
    "layer_types": MIXED["layer_types"] * 2,
    "sliding_window": 6,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}

PLAIN: Final = {  # decoders in which every layer attends to everything, of `LAYERS` layers
    "llama": Architecture(SIZES),
    "mistral": Architecture(SIZES | {"sliding_window": None}),
    "qwen2": Architecture(SIZES | {"use_sliding_window": False}),
    "qwen3": Architecture(SIZES | {"head_dim": 12}),
    "gemma": Architecture(SIZES | {"head_dim": 16}),
    "olmo2": Architecture(SIZES),
    "granite": Architecture(SIZES),
    "phi": Architecture(MULTI_HEAD),
    "stablelm": Architecture(SIZES),
    "starcoder2": Architecture(SIZES | {"sliding_window": None}),
    "gpt_neox": Architecture(SIZES),
    "opt": Architecture(SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": Architecture(GPT2),
    "gpt_bigcode": Architecture(GPT2),
    "gptj": Architecture(GPT2 | {"rotary_dim": 4}),
    "codegen": Architecture(GPT2 | {"rotary_dim": 4}),
    "bloom": Architecture({"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": Architecture(SIZES | {"alibi": False, "multi_query": True}),
}

DECODERS: Final = {
    "ministral3": Architecture(HEADS_OF_8 | {"sliding_window": None}),
    "olmo": Architecture(TWO),
    "phi3": Architecture(TWO | {"sliding_window": None}),
    "gpt_neox_japanese": Architecture(TWO | {"intermediate_multiple_size": 2}),
    "helium": Architecture(HEADS_OF_8),
    "cohere": Architecture(TWO),
    "glm": Architecture(HEADS_OF_8),
    "glm4": Architecture(HEADS_OF_8),
    "nemotron": Architecture(TWO),
    "persimmon": Architecture(TWO_HEADED),
    "seed_oss": Architecture(TWO),
    "smollm3": Architecture(TWO),
    "arcee": Architecture(TWO),
    "apertus": Architecture(TWO),
    "ernie4_5": Architecture(HEADS_OF_8),
    "hunyuan_v1_dense": Architecture(HEADS_OF_8),
    "jais2": Architecture(TWO),
    "bitnet": Architecture(TWO),
    "diffllama": Architecture(TWO),
    "nanochat": Architecture(TWO),
    "doge": Architecture(TWO),
    # positions that are learned, or alibi
    "gpt_neo": Architecture(
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"window_size": 6, "intermediate_size": 48, "max_position_embeddings": 256}
    ),
    "xglm": Architecture(
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 256}
        | {"init_std": 0.2}
    ),
    "biogpt": Architecture(TWO_HEADED),
    "ctrl": Architecture(GPT2 | {"dff": 48}),
    "cpmant": Architecture(TWO_HEADED | {"dim_head": 8, "dim_ff": 48}),
    "mpt": Architecture(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "expansion_ratio": 2, "use_cache": True}
    ),
    # one head of keys and values for all
    "falcon-alibi": Architecture(TWO | {"alibi": True, "multi_query": False}, model_type="falcon"),
    # encoders that decode
    "bert": Architecture(BERT),
    "roberta": Architecture(BERT),
    "electra": Architecture(BERT | {"embedding_size": 32}),
    "roformer": Architecture(BERT | {"embedding_size": 32}),
    "rembert": Architecture(BERT),
    "megatron-bert": Architecture(BERT),
    "trocr": Architecture(
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": 0.2}
        | {"max_position_embeddings": 256}
    ),
    # windows beside full attention, and alone
    "gemma2": Architecture(GEMMA),
    "gemma3_text": Architecture(GEMMA),
    "vaultgemma": Architecture(GEMMA),
    "cohere2": Architecture(TWO | MIXED),
    "olmo3": Architecture(TWO | MIXED),
    "exaone4": Architecture(TWO | MIXED | {"sliding_window_pattern": 2}),
    "cwm": Architecture(TWO | MIXED),
    "modernbert-decoder": Architecture(TWO | {"local_attention": 12, "global_attn_every_n_layers": 2}),
    "mistral-window": Architecture(TWO | {"sliding_window": 6}, model_type="mistral"),
    # layers that use the keys and values of others
    "gemma3n_text": Architecture(
        HEADS_OF_8
        | _SHARED_KV
        | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4}
        | {"laurel_rank": 4, "altup_num_inputs": 2}
    ),
    "gemma4_text": Architecture(HEADS_OF_8 | _SHARED_KV | {"global_head_dim": 16}),
}

EXPERT_MODELS: Final = {
    "llama4_text": Architecture(  # in transformers 5.24 the one with images lacks a field of its output
        HEADS_OF_8
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
        | {"attention_chunk_size": 6, "layer_types": ["full_attention", "chunked_attention"]},
    ),
    "mixtral": Architecture(MOE | {"sliding_window": None}),
    "qwen2_moe": Architecture(MOE | {"sliding_window": None}),
    "qwen3_moe": Architecture(MOE),
    "olmoe": Architecture(MOE),
    "phimoe": Architecture(MOE | {"sliding_window": None}),
    "granitemoe": Architecture(MOE),
    "granitemoeshared": Architecture(MOE),
    "jetmoe": Architecture(MOE | {"kv_channels": 8}),
    "ernie4_5_moe": Architecture(MOE | {"moe_num_experts": 4, "moe_k": 2, "head_dim": 8}),
    "hunyuan_v1_moe": Architecture(MOE | {"head_dim": 8, "moe_topk": 2, "sliding_window": None}),
    "flex_olmo": Architecture(MOE),
    "minimax_m2": Architecture(MOE | {"head_dim": 8, "rotary_dim": 4}),
    "dbrx": Architecture(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}
    ),
    "gpt_oss": Architecture(MOE | {"head_dim": 8} | MIXED),
    "dots1": Architecture(LATENT | {"num_key_value_heads": 2}),
    "glm4_moe": Architecture(LATENT | {"num_key_value_heads": 2, "head_dim": 8}),
    # keys and values of different width
    "deepseek_v2": Architecture(LATENT),
    "deepseek_v3": Architecture(LATENT),
    "glm4_moe_lite": Architecture(LATENT),
    "longcat_flash": Architecture(
        LATENT
        | {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 4, "moe_topk": 2, "zero_expert_num": 1}
        | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24}
    ),
    "mimo_v2_flash": Architecture(MOE | MIXED | {"head_dim": 8, "v_head_dim": 12}),
}
