"""A tiny model for vLLM, and what vLLM says of it without ballonet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from .running import asked

VOCABULARY = 199


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama as vLLM's kernels for CPUs want it, heads of 32, with a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
    )
    made = transformers.LlamaForCausalLM(config)
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokens of each request of each wave, of an engine without the connector."""
    return asked(model, tmp_path_factory.mktemp("stock"), None)["said"]
