"""Models with layers that keep a state, or more than keys and values, or a cache of their own kind."""

from __future__ import annotations

from typing import Final

from .base import HEADS_OF_8, HYBRID, LATENT, MOE, STATEFUL, TWO, TWO_HEADED, Architecture

_MAMBA: Final = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
_MAMBA2: Final = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_DELTA: Final = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}

_INDEXED: Final = LATENT | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}


RECURRENT: Final = {
    # attention and a state in one layer
    "falcon_h1": Architecture(HEADS_OF_8 | _MAMBA2 | {"mamba_d_head": 8, "mamba_d_ssm": 32}, refuses=STATEFUL),
    "zamba": Architecture(
        TWO_HEADED
        | {"num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 2}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
        refuses=STATEFUL,
    ),
    "zamba2": Architecture(
        TWO_HEADED
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
        | {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 4, "use_mem_rope": True},
        refuses=STATEFUL,
    ),
    # layers of attention among layers with a state
    "bamba": Architecture(TWO | _MAMBA2 | {"attn_layer_indices": [0]}, refuses=STATEFUL),
    "jamba": Architecture(
        MOE
        | {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 4, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
        refuses=STATEFUL,
    ),
    "nemotron_h": Architecture(
        HEADS_OF_8
        | LATENT
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"], "head_dim": 8, "n_groups": 2}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 4}
        | {"moe_shared_expert_intermediate_size": 24},
        refuses=STATEFUL,
    ),
    "granitemoehybrid": Architecture(MOE | _MAMBA2 | {"layer_types": ["attention", "mamba"]}, refuses=STATEFUL),
    "qwen3_next": Architecture(MOE | HYBRID | _DELTA | {"head_dim": 8, "linear_num_value_heads": 4}, refuses=STATEFUL),
    "qwen3_5_text": Architecture(HEADS_OF_8 | HYBRID | _DELTA | {"linear_num_value_heads": 4}, refuses=STATEFUL),
    "olmo_hybrid": Architecture(TWO | HYBRID | _DELTA | {"linear_num_value_heads": 2}, refuses=STATEFUL),
    "lfm2": Architecture(TWO | {"layer_types": ["full_attention", "conv"]}),
    "lfm2_moe": Architecture(MOE | {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1}),
    # no attention that grows
    "recurrent_gemma": Architecture(
        TWO | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 6}, refuses=STATEFUL
    ),
    "mamba": Architecture(_MAMBA, refuses=STATEFUL),
    "falcon_mamba": Architecture(_MAMBA, refuses=STATEFUL),
    "mamba2": Architecture(
        _MAMBA | {"state_size": 8, "num_heads": 4, "head_dim": 16, "chunk_size": 4, "n_groups": 1}, refuses=STATEFUL
    ),
    # more than keys and values
    "glm_moe_dsa": Architecture(_INDEXED),
    "deepseek_v4": Architecture(LATENT | {"head_dim": 16}, refuses=STATEFUL),
    # no DynamicCache
    "minimax": Architecture(MOE | HYBRID | {"head_dim": 8, "block_size": 4}, refuses={"assisted": "requires a cache"}),
    "rwkv": Architecture(
        {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64},
        refuses=STATEFUL | {"beam": "cannot be reordered"},
    ),
}
