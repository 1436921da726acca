"""Models with a language model inside; some are shown images, the others only text."""

from __future__ import annotations

from typing import Final

import torch

from .base import (
    FROM_IMAGE,
    GEMMA,
    HEADS_OF_8,
    IMAGE,
    MIXED,
    PAD,
    TO_TEXT,
    TWO,
    TWO_HEADED,
    VISION,
    VOCABULARY,
    Architecture,
    Tensors,
    floats,
    image,
)

_CLIP: Final = VISION | {"model_type": "clip_vision_model"}
_SIGLIP: Final = VISION | {"model_type": "siglip_vision_model"}
_LLAMA: Final = TWO | {"model_type": "llama"}
_M_ROPE: Final = TWO | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
_QWEN_VISION: Final = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
_QWEN_TOKENS: Final = {
    "image_token_id": IMAGE,
    "video_token_id": 197,
    "vision_start_token_id": 196,
    "vision_end_token_id": 195,
}


def _qwen_image(batch: int) -> Tensors:
    """Each image is 4 x 4 patches, which become 2 x 2 tokens."""
    return {
        "pixel_values": floats(batch * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
    }


MULTIMODAL: Final = {
    "llava": Architecture(
        {"text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": IMAGE, "vision_feature_layer": -1},
        FROM_IMAGE,
        prefix=(IMAGE,) * 4,
        extra=image,
    ),
    "gemma3": Architecture(
        {"text_config": GEMMA, "vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": IMAGE}
        | {"boi_token_index": 197, "eoi_token_index": 196},
        FROM_IMAGE,
        prefix=(197, *[IMAGE] * 4, 196),
        extra=image,
    ),
    "paligemma": Architecture(
        {"text_config": HEADS_OF_8 | {"model_type": "gemma"}, "vision_config": _SIGLIP | {"projection_dim": 32}}
        | {"projection_dim": 32, "image_token_index": IMAGE},
        FROM_IMAGE,
        prefix=(IMAGE,) * 4,
        extra=image,
    ),
    "qwen2_vl": Architecture(
        {"text_config": _M_ROPE, "vision_config": _QWEN_VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}}
        | _QWEN_TOKENS,
        FROM_IMAGE,
        prefix=(196, *[IMAGE] * 4, 195),
        extra=_qwen_image,
    ),
    "qwen2_5_vl": Architecture(
        {
            "text_config": _M_ROPE,
            "vision_config": _QWEN_VISION
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16}
            | {"window_size": 16, "fullatt_block_indexes": [0]},
        }
        | _QWEN_TOKENS,
        FROM_IMAGE,
    ),
    "qwen3_vl": Architecture(
        {
            "text_config": _M_ROPE | {"head_dim": 8},
            "vision_config": _QWEN_VISION
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16}
            | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        }
        | _QWEN_TOKENS,
        FROM_IMAGE,
    ),
    "idefics3": Architecture(
        {"text_config": _LLAMA, "vision_config": VISION, "image_token_id": IMAGE, "scale_factor": 2}, FROM_IMAGE
    ),
    "internvl": Architecture(
        {"text_config": _LLAMA | {"model_type": "qwen2"}, "image_token_id": IMAGE, "downsample_ratio": 0.5}
        | {"vision_config": VISION | {"image_size": [8, 8], "patch_size": [4, 4]}, "image_seq_length": 1},
        FROM_IMAGE,
    ),
    "aya_vision": Architecture(
        {"text_config": TWO | MIXED | {"model_type": "cohere2"}, "vision_config": _SIGLIP}
        | {"image_token_index": IMAGE, "vision_feature_layer": -1},
        FROM_IMAGE,
    ),
    "chameleon": Architecture(
        TWO
        | {"vocabulary_map": {"<image>": IMAGE}}
        | {
            "vq_config": {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 8}
            | {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
        },
        FROM_IMAGE,
    ),
    "blip-2": Architecture(
        {
            "text_config": TWO
            | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "vocab_size": VOCABULARY},
            "vision_config": VISION,
            "qformer_config": VISION | {"encoder_hidden_size": 16, "vocab_size": 20},
            "num_query_tokens": 2,
            "image_token_index": IMAGE,
        },
        FROM_IMAGE,
        prefix=(IMAGE,) * 2,
        extra=image,
        refuses={"continued": "missing 1 required positional argument: 'pixel_values'"},
    ),
    "mllama": Architecture(
        {
            "text_config": TWO | {"num_hidden_layers": 3, "cross_attention_layers": [1], "pad_token_id": PAD},
            "vision_config": VISION
            | {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32}
            | {"intermediate_layers_indices": [0]},
            "image_token_index": IMAGE,
        },
        FROM_IMAGE,
    ),
    "git": Architecture(TWO_HEADED | {"vision_config": VISION}, extra=image),
    "fuyu": Architecture({"text_config": TWO_HEADED | {"model_type": "persimmon"}, "patch_size": 4, "hidden_size": 32}),
    "qwen2_audio": Architecture(
        {"text_config": _LLAMA | {"model_type": "qwen2"}, "audio_token_index": IMAGE}
        | {"audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}},
        TO_TEXT,
    ),
}
