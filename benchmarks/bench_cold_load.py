"""From a model's file, in the page cache, to its first token: what that takes, and what it takes of memory.

Each load is in a new process, which has imported everything and used the device before. The yardstick is the file over
the link, as measured in the same run. "ballonet" has room for the whole model, "ballonet, smaller" has a budget of 60 %
of the file, so that layers stream; stock is `from_pretrained(device_map=...)`. Of the host is counted what the process
holds for itself and of files, at its peak, less what it held before; of the device the pages that existed at once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import MIB, Figure, Options, describe, report
from peer import Functions, bandwidth, begin, peers, seconds
from streamed import environment, page_size, titled

NAMES = {
    "cuda": ("stock", "ballonet", "ballonet, smaller"),
    "cpu": ("stock", "ballonet", "ballonet, smaller"),
    "tiny": ("ballonet, smaller",),
}
ROUNDS = {"cuda": 2, "cpu": 2, "tiny": 1}
LAYERS = 12  # of the 8B shape on a GPU: 7 GiB
SMALLER = 0.6  # of the file, the budget
TIME, HOST = 1.3, 1.05
TOKENS = 4  # that are generated after the first, while memory is watched


def main() -> None:
    chosen = begin("cold-load", __doc__, functions)
    kind = chosen.kind
    taken: dict[str, list[float]] = {name: [] for name in NAMES[kind]}
    file_peer = peers(__file__, chosen, ("file",), {"file": environment(chosen)})
    with tempfile.TemporaryDirectory() as folder, file_peer as started:
        nbytes, what = started["file"].ask("write", folder=folder)
        answers: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS[kind]):
            for name in NAMES[kind]:
                answers[name] = once(name, chosen, "load", folder=folder, nbytes=nbytes)
                taken[name].append(answers[name]["ms"])
        link = float(started["file"].ask("link"))
    rows = []
    for name, found in answers.items():
        ms = Figure.of(taken[name])
        over = Figure.of([ms.median / (nbytes / link * 1e3)])
        host, device = Figure.of([found["host"] / nbytes]), Figure.of([found["device"] / found["budget"]])
        ours = name != "stock"
        rows.append(
            {
                "": name,
                "ms": ms,
                "ms / file over link": over.at_most(TIME) if ours and chosen.cuda else over,
                "host / file": host.at_most(HOST) if ours else host,
                "budget MiB": round(found["budget"] / MIB) if ours else "",
                "device / budget": device.at_most(1) if ours else "",
                "layers that stream": found["streamed"],
            }
        )
    title = f"cold load of a file of {round(nbytes / MIB):,} MiB, {what}: ms to the first token"
    report(chosen, "cold-load", titled(chosen, title), rows)


def once(name: str, chosen: Options, what: str, **arguments: Any) -> Any:
    """Asks a process that does nothing else."""
    with peers(__file__, chosen, (name,), {name: environment(chosen)}) as found:
        return found[name].ask(what, **arguments)


def functions(name: str, chosen: Options) -> Functions:
    if name != "file":
        return {"load": lambda folder, nbytes: load(name, folder, nbytes, chosen)}
    return {"write": lambda folder: write(folder, chosen), "link": lambda: bandwidth(chosen)()}


def write(folder: str, chosen: Options) -> tuple[int, str]:
    """Bytes of the weights' file, and what it is of."""
    from llama import build, few, streamable

    config = few(chosen, LAYERS) if chosen.cuda and not chosen.tiny else streamable(chosen)
    build(config, chosen.device).save_pretrained(folder, max_shard_size="100GB")
    nbytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return nbytes, f"{config.num_hidden_layers} layers of the {describe(chosen)}"


def use_another(prompt: Any, managed: bool) -> None:
    """Imports what a model needs, and has the libraries load theirs, by means of a tiny one."""
    import gc

    from llama import TINY, build

    import ballonet

    model = build(TINY, prompt.device.type)
    if managed:
        with ballonet.manage(model):
            model.generate(prompt, max_new_tokens=2, do_sample=False)
    else:
        model.generate(prompt, max_new_tokens=2, do_sample=False)
    del model
    gc.collect()


def load(name: str, folder: str, nbytes: int, chosen: Options) -> dict[str, Any]:
    import torch
    from footprint import Peaks
    from transformers import AutoModelForCausalLM

    import ballonet
    from ballonet.allocator import devices

    stock = name == "stock"
    from_pretrained = AutoModelForCausalLM.from_pretrained if stock else ballonet.from_pretrained
    budget = int(nbytes * SMALLER) if name.endswith("smaller") else 2 * nbytes + 64 * MIB
    if not stock:
        page = page_size(chosen)
        ballonet.install(budget, page_size=page)
        budget = ballonet.stats().budget
    prompt = torch.ones(1, 8, dtype=torch.long, device=chosen.device)
    use_another(prompt, managed=not stock)
    models: list[Any] = []

    def first_token() -> None:
        models.append(from_pretrained(folder, dtype="auto", device_map=chosen.device))
        models[0].generate(prompt, max_new_tokens=1, do_sample=False)

    with Peaks() as peaks:
        ms = seconds(chosen.device, first_token) * 1e3
        models[0].generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    if stock:
        return {"ms": ms, "host": peaks.host, "device": 0, "budget": 1, "streamed": 0}
    device = devices.require()
    host_pages = 0 if device.kind == "standin" else device.snapshot()["host_pages"] * device.page_size
    return {
        "ms": ms,
        "host": peaks.host + host_pages,
        "device": max(peaks.device, device.snapshot()["physical_peak"]),
        "budget": budget,
        "streamed": len(ballonet.manage(models[0]).report().streamed),
    }


if __name__ == "__main__":
    main()
