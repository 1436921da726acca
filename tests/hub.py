"""A cache folder of the hub with the model of the README in it: its example runs unchanged, and without a network.

The model is SmolLM2's own or a small one made here, and goes by the same name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .gpu.scene import environment

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT = "0" * 40
WORDS = 64  # of a made tokenizer: these, and numbers
KNOWN = "Once upon a time What is the capital of France user assistant : ?"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def variables_of(folder: Path, model: Path) -> dict[str, str]:
    """Fills the cache `folder` with links to the files of `model`, as the hub does. Returns the variables of a process
    that finds it there and has no settings of ballonet."""
    kept = folder / "hub" / f"models--{NAME.replace('/', '--')}"
    for part in (kept / "refs", kept / "snapshots" / COMMIT):
        part.mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    for file in model.iterdir():
        (kept / "snapshots" / COMMIT / file.name).symlink_to(file)
    variables = {name: value for name, value in environment().items() if name != "BALLONET_SPILL"}
    return {**variables, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


def made_model(folder: Path, template: str | None = None, **changes: Any) -> Path:
    """A tiny model and a tokenizer of words, in `folder`. `template`: of chats; `changes` go to its configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    known = ["<unk>", *KNOWN.split()]
    words = [*known, *map(str, range(WORDS - len(known)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, initializer_range=0.2, tie_word_embeddings=False, **(sizes | changes))
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def made_chat_model(folder: Path) -> Path:
    """A model of 256 MiB in `folder`, as SmolLM2-135M has in bfloat16, so that the README's budget is below it, too.

    One word in eight ends an answer.
    """
    import torch

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    return made_model(folder, TEMPLATE, **sizes, eos_token_id=list(range(WORDS - 8, WORDS)), pad_token_id=0)


def in_bfloat16(source: Path, folder: Path) -> Path:
    """The model of the folder `source` in `folder`, with its weights in bfloat16, as the hub has SmolLM2's."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
            continue
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
