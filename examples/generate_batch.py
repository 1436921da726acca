"""Many prompts at once, by transformers' continuous batching: a script that knows nothing of ballonet.

    python examples/generate_batch.py MODEL "a prompt" "another prompt" --copies 16
    ballonet run --budget 24GiB examples/generate_batch.py MODEL "a prompt" "another prompt" --copies 16

Each prompt is asked `--copies` times with a number before it, so that no two requests are the same. The second line
runs the same script with the KV of all requests, weights and activations in one pool of pages.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--copies", type=int, default=4, help="requests per prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default %(default)s)")
    parser.add_argument("--blocks", type=int, help="of KV; as many as there is memory for where it is not given")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device)
    asked = [f"{copy}. {prompt}" for prompt in options.prompts for copy in range(options.copies)]
    settings = GenerationConfig(
        max_new_tokens=options.tokens,
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=0,
    )
    began = time.perf_counter()
    found = model.generate_batch(
        [tokenizer(text)["input_ids"] for text in asked],
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=options.blocks),
    )
    seconds = time.perf_counter() - began
    for answer in found.values():
        print(tokenizer.decode(answer.prompt_ids + answer.generated_tokens, skip_special_tokens=True))
    tokens = sum(len(answer.generated_tokens) for answer in found.values())
    print(f"{len(found)} requests, {tokens} tokens, {tokens / seconds:.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
