"""The processes that decode while layers stream: each holds one model and says how long a token takes it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Options, describe
from generating import Clock, timed
from llama import build, few, filled, streamable
from peer import Functions, synchronize
from streamed import WARM, interval_of, is_managed, page_size
from transformers import PreTrainedModel

import ballonet

LARGE = 2**16  # bytes of a copy that is no scalar


def functions(peer: str, chosen: Options) -> Functions:
    """What a peer answers, see peer.begin(). Of a layer that streams "about" tells the bytes."""
    model, managed = prepare(peer, chosen)

    def decode(batch: int, held: int, tokens: int) -> dict[str, Any]:
        return decoded(peer, model, chosen.device, batch, held, tokens)

    def trace(batch: int, held: int, path: str) -> int:
        return traced(lambda: decode(batch, held, WARM + 1), Path(path), chosen.device)

    about = {"what": describe(chosen), "layers": model.config.num_hidden_layers, "layer": 0}
    if managed is not None and managed.report().streamed:
        about["layer"] = managed.report().host_pages * ballonet.stats().page_size // len(managed.report().streamed)
    return {"about": lambda: about, "decode": decode, "trace": trace}


def at_any_interval(chosen: Options, layers: int) -> Functions:
    """Answers of one process whose model, of so many layers, is managed anew for each question."""
    ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=page_size(chosen))
    model = build(few(chosen, layers), chosen.device)

    def about() -> dict[str, Any]:
        with ballonet.manage(model, interval=1) as managed:
            layer = managed.report().host_pages * ballonet.stats().page_size // len(managed.report().streamed)
        return {"layer": layer}

    def decode(interval: int | None, held: int, tokens: int) -> float:
        with ballonet.manage(model, interval=interval):
            ms: float = decoded("resident", model, chosen.device, 1, held, tokens)["ms"]
        return ms

    return {"about": about, "decode": decode}


def prepare(peer: str, chosen: Options) -> tuple[PreTrainedModel, ballonet.Managed | None]:
    """The peer's model, of the shape that is measured here."""
    managed = None
    if is_managed(peer):
        ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=page_size(chosen))
    model = build(streamable(chosen), chosen.device)
    if is_managed(peer):
        managed = ballonet.manage(model, interval=interval_of(peer))
    elif peer == "accelerate":
        every_second_on_the_host(model)
    elif peer == "diffusers":
        in_groups(model)
    return model, managed


def every_second_on_the_host(model: PreTrainedModel) -> None:
    from accelerate import dispatch_model

    places: dict[str, str | int | torch.device] = {
        f"model.layers.{layer}": "cpu" if layer % 2 else 0 for layer in range(model.config.num_hidden_layers)
    }
    rest = {name: 0 for name, _ in model.model.named_children() if name != "layers"}
    places |= {f"model.{name}": place for name, place in rest.items()} | {"lm_head": 0}
    for name, place in places.items():
        if place == "cpu":
            model.get_submodule(name).to("cpu")
    dispatch_model(model, places, main_device=0)


def in_groups(model: PreTrainedModel) -> None:
    from diffusers.hooks import apply_group_offloading

    device = model.device
    model.model.to("cpu")
    apply_group_offloading(
        model.model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        non_blocking=True,
        use_stream=True,
    )


def wait(device: str) -> None:
    """For the current stream, and not for copies of others."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def decoded(peer: str, model: PreTrainedModel, device: str, batch: int, held: int, tokens: int) -> dict[str, Any]:
    """`generate()` with a cache that holds so many tokens. ms per token: the median; bytes of weights per token."""
    cache = filled("ballonet" if is_managed(peer) else peer, model.config, batch, held, device)
    moved = copied(peer)
    clock = timed(model, cache, (batch, held), device, tokens, Clock(device, wait=wait))
    synchronize(device)
    return figures(peer, clock.times, moved, tokens)


def figures(peer: str, times: list[float], before: Mapping[str, int], tokens: int) -> dict[str, Any]:
    """`times`: after each token, s."""
    if len(times) != tokens:
        raise RuntimeError(f"generate() stopped after {len(times)} of {tokens} tokens")
    after = copied(peer)
    gone = [b - a for a, b in zip(times[WARM - 1 :], times[WARM:], strict=False)]
    return {
        "ms": median(gone) * 1e3,
        "bytes": (after["weights_h2d"] - before["weights_h2d"]) / tokens,
        "back": after["weights_d2h"] - before["weights_d2h"],
    }


def copied(peer: str) -> Mapping[str, int]:
    return dict(ballonet.stats().copied) if is_managed(peer) else {"weights_h2d": 0, "weights_d2h": 0}


def traced(work: Callable[[], object], path: Path, device: str) -> int:
    """Bytes of large copies to the host while `work` runs, as the profiler saw them; `path`: of its trace, gzipped."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    to_host = (each for each in events if re.match(r"Memcpy DtoH", str(each.get("name"))))
    sizes = (each.get("args", {}).get("bytes", 0) for each in to_host)
    return sum(size for size in sizes if size >= LARGE)
