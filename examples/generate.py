"""A script that knows nothing of ballonet: a causal language model answers a prompt, or goes on with it.

    python examples/generate.py MODEL "a prompt"
    ballonet run --budget 24GiB examples/generate.py MODEL "a prompt"

MODEL is a folder or a name that transformers finds. The second line runs the same script with its weights,
activations and KV cache in one pool of pages.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default %(default)s)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device)
    if tokenizer.chat_template is None:
        inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    else:  # a chat model may end at once after a text that is no message
        chat = [{"role": "user", "content": options.prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs.to(device), max_new_tokens=options.tokens, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
