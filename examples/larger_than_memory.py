"""A language model that is larger than the device memory it is given answers a prompt.

    python examples/larger_than_memory.py MODEL "a prompt" --budget 8GiB

MODEL is a folder or a name that transformers finds. Its weights are never whole on the device: as many layers as do
not fit stay in its files and come over while the layers before them compute.
"""

from __future__ import annotations

import argparse
import sys

from transformers import AutoTokenizer

import ballonet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--budget", help="device memory to use (default: what is free)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default %(default)s)")
    options = parser.parse_args()
    ballonet.install(budget=options.budget)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = ballonet.from_pretrained(options.model)
    print(ballonet.manage(model), file=sys.stderr)
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
