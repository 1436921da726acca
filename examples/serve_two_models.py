"""Two models behind one server share the memory of one: whoever is asked has the pages, and the other one lends.

    python examples/serve_two_models.py                         two small models made on the spot, which only babble
    python examples/serve_two_models.py FOLDER FOLDER --budget 24GiB

Starts `ballonet serve`, asks the one model many things at once, then the other, then both, and says after each burst
who has which pages, and how many requests of how many were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

BURSTS = (("the first", (1, 0)), ("the second", (0, 1)), ("both", (1, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="two folders or names; none: made on the spot")
    parser.add_argument("--budget", default="56MiB", help="device pages (default: %(default)s)")
    parser.add_argument("--host-budget", default="64MiB", help="host pages (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="of a burst, for each model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer (default: %(default)s)")
    options = parser.parse_args()
    if len(options.models) not in (0, 2):
        parser.error("two models, or none")
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or [made(Path(folder) / name, seed) for seed, name in enumerate(("one", "other"))]
        with server(models, options) as url:
            table = Table("asked", "answered", "weights, MiB", "KV, MiB", "activations, MiB", "on the host, MiB", "s")
            for name, asked in BURSTS:
                began = time.perf_counter()
                chosen = [model for model, wanted in zip(models, asked, strict=True) if wanted]
                answered = asyncio.run(burst(url, chosen, options.requests, options.tokens))
                took = time.perf_counter() - began
                now = figures(url)
                sizes = [now[each] / 2**20 for each in ("weights", "kv", "activations", "host")]
                count = len(chosen) * options.requests
                table.add_row(name, f"{answered} of {count}", *(f"{size:.1f}" for size in sizes), f"{took:.1f}")
            Console().print(table)


def made(folder: Path, seed: int) -> str:
    """A model with random weights, and a tokenizer of letters."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    letters = {letter: n for n, letter in enumerate("\0 abcdefghijklmnopqrstuvwxyz.,?")}
    tokenizer = Tokenizer(BPE(letters, [], unk_token="\0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\0").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(letters),
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@contextmanager
def server(models: list[str], options: argparse.Namespace) -> Iterator[str]:
    """`ballonet serve` in a process of its own, until it is ready; where it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    sizes = ("--budget", options.budget, "--host-budget", options.host_budget, "--block-size", "32")
    command = [sys.executable, "-m", "ballonet", "serve", *models, "--port", port, *sizes]
    process = subprocess.Popen(command, env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"})
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            if process.poll() is not None:
                raise SystemExit("the server has ended")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Is the server ready?"""
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except OSError:
        return False


async def burst(url: str, models: list[str], requests: int, tokens: int) -> int:
    """Asks each model so many things at once; how many were answered."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asks = [
            client.completions.create(model=model, prompt=f"request {n} says ", max_tokens=tokens)
            for n in range(requests)
            for model in models
        ]
        found = await asyncio.gather(*asks, return_exceptions=True)
    return sum(not isinstance(each, BaseException) for each in found)


def figures(url: str) -> dict[str, float]:
    """Bytes by owner, of what the server says of itself."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    found = {each.labels["owner"]: each.value for each in samples if each.name == "ballonet_device_bytes"}
    return found | {"host": next(each.value for each in samples if each.name == "ballonet_host_bytes")}


if __name__ == "__main__":
    main()
