"""A `generate()` that needs more device memory than it is given goes on, slower, and says what it did for that.

    python examples/outgrows_its_budget.py MODEL "a prompt" --budget 16GiB --tokens 8000 --copies 8

MODEL is a folder or a name that transformers finds. The cache of the prompt and its answer, for so many copies at once,
may be larger than what its weights leave of the budget. With stock torch that is `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import ballonet
from ballonet.allocator.units import format_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--budget", required=True, help="device memory to use")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default %(default)s)")
    parser.add_argument("--copies", type=int, default=1, help="sequences at once (default %(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("once")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ballonet.install(budget=options.budget)
    model = ballonet.from_pretrained(options.model)
    inputs = tokenizer([options.prompt] * options.copies, return_tensors="pt", return_token_type_ids=False)
    lengths = {"min_new_tokens": options.tokens, "max_new_tokens": options.tokens}  # answers do not end before
    output = model.generate(**inputs.to(model.device), **lengths, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    tell(ballonet.stats())


def tell(found: ballonet.Stats) -> None:
    """What was decided, by source, and what it cost."""
    table = Table("source", "verb", "times", "memory", "seconds", title=f"within {format_size(found.budget)}")
    for source, verbs in found.events.items():
        for verb, count in verbs.items():
            memory = format_size(count.pages * found.page_size)
            table.add_row(source, verb, f"{count.events:,}", memory, f"{count.seconds:.3f}")
    Console(file=sys.stderr).print(table)


if __name__ == "__main__":
    main()
