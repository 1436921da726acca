"""Encoder-decoder models of text, speech and images."""

from __future__ import annotations

from typing import Final

from .base import (
    BERT,
    FROM_IMAGE,
    FROM_SPEECH,
    GEMMA,
    TO_TEXT,
    TWO_HEADED,
    VISION,
    VOCABULARY,
    Architecture,
    floats,
    image,
)

_T5: Final = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_T5_START: Final = {"decoder_start_token_id": 2}
_BART: Final = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 256,
    "init_std": 0.2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


ENCODER_DECODERS: Final = {
    "t5": Architecture(_T5 | _T5_START, TO_TEXT),
    "mt5": Architecture(_T5 | _T5_START, TO_TEXT),
    "umt5": Architecture(_T5 | _T5_START, TO_TEXT),
    "longt5": Architecture(_T5 | _T5_START | {"local_radius": 4, "global_block_size": 4}, TO_TEXT),
    "switch_transformers": Architecture(
        _T5 | _T5_START | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}, TO_TEXT
    ),
    "bart": Architecture(_BART, TO_TEXT),
    "mbart": Architecture(_BART, TO_TEXT),
    "marian": Architecture(_BART, TO_TEXT),
    "pegasus": Architecture(_BART, TO_TEXT),
    "blenderbot": Architecture(_BART, TO_TEXT),
    "m2m_100": Architecture(_BART, TO_TEXT),
    "plbart": Architecture(_BART, TO_TEXT),
    "bigbird_pegasus": Architecture(_BART | {"attention_type": "original_full"}, TO_TEXT),
    "led": Architecture(
        _BART | {"attention_window": 4, "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256},
        TO_TEXT,
    ),
    "fsmt": Architecture(
        _BART | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]}, TO_TEXT
    ),
    "nllb-moe": Architecture(_BART | {"num_experts": 4, "encoder_sparse_step": 0, "decoder_sparse_step": 2}, TO_TEXT),
    "t5gemma": Architecture(
        {"encoder": GEMMA, "decoder": GEMMA | {"cross_attention_hidden_size": 32}} | _T5_START, TO_TEXT
    ),
    "encoder-decoder": Architecture(
        {
            "encoder": TWO_HEADED | {"model_type": "bert"},
            "decoder": BERT | {"model_type": "bert", "add_cross_attention": True},
        }
        | _T5_START,
        TO_TEXT,
    ),
    "whisper": Architecture(
        _BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 128},
        FROM_SPEECH,
        tokens=False,
        extra=lambda batch: {"input_features": floats(batch, 8, 24)},
        returns_another_cache=True,
    ),
    "speech_to_text": Architecture(
        _BART
        | {"num_conv_layers": 1, "conv_kernel_sizes": [3], "input_feat_per_channel": 8, "conv_channels": 8}
        | {"max_source_positions": 64, "max_target_positions": 128},
        FROM_SPEECH,
        tokens=False,
        extra=lambda batch: {"input_features": floats(batch, 24, 8)},
    ),
    "moonshine": Architecture(
        {"hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2}
        | {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
        | _T5_START,
        FROM_SPEECH,
        tokens=False,
        extra=lambda batch: {"input_values": floats(batch, 2000)},
    ),
    "vision-encoder-decoder": Architecture(
        {
            "encoder": VISION | {"model_type": "vit"},
            "decoder": BERT | {"model_type": "bert", "add_cross_attention": True},
        }
        | _T5_START,
        FROM_IMAGE,
        tokens=False,
        extra=image,
    ),
}
