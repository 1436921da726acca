"""The output of `ballonet info MODEL`: sizes of a model's weights, which layers of its KV cache are elastic,
why, and their sizes.

Reads only the configuration. `kinds.plan` decides, as for a managed model. The widths of keys and values come from one
token through the model without values (the meta device), as configurations are wrong about them for some architectures.
"""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import nn

from ...allocator import device_choice
from ...allocator.config import Config
from ...allocator.errors import BallonetError, ConfigError
from ...allocator.units import format_size
from ...offload.policy.geometry import longest
from ...offload.policy.plan import Fewest
from ..compat import DynamicCache, generating_class, load_config, longest_sequence, one_shape, run_without_values
from ..kv.cache import CachePlan, LayerPlan, plan
from ..kv.ranges import CacheSizes, geometry_for
from ..pieces.outlook import foreseen
from ..weights.model_parts import decoder_layers

Facts = dict[str, Any]
Widths = tuple[int, int, int]  # heads, elements of a key, elements of a value
_UNLIMITED: Final = 2**63  # bytes
_DECODING: Final = {
    "fine": "by CUDA graphs, cut at the cache's update and at attention",
    "coarse": "by CUDA graphs, cut around modules that are given the cache",
    "eager": "every kernel is launched",
    "": "how is known with the first call",
}


def gather(name: str, settings: Config, batch: int, tokens: int) -> Facts:
    """Returns plain values, ready for JSON. `name`: a folder, a model type or a name on the hub. ConfigError.

    Keys: model, type, class, reason (why nothing is elastic, else empty), widths (why they are not known, else empty),
    batch, tokens, page_size, dtype, weights (bytes, None where transformers does not build the model without values),
    smallest (bytes of them that the device must have, if all other layers stream), bytes (of all elastic layers, None
    where not known), layers: a list with one entry for all layers that are alike: {indices, cross (whether they hold
    the encoder's output), kind, stock, layer, elastic, why}, and where they are elastic and their widths known {heads,
    k_dim, v_dim, longest (tokens that attention kernels can index)}; up to that length also {token_bytes (of one layer,
    for one token of the whole batch), layers_per_range, bytes (of all these layers, in whole pages)}; pieces: {way
    ("fine", "coarse" or "eager", as CUDA graphs are cut on a GPU; empty where only the first call tells), why}.
    """
    quiet()
    config = load_config(name)
    model_class = generating_class(config)
    facts: Facts = {"model": name, "type": config.model_type, "class": model_class and model_class.__name__}
    if model_class is None:
        caches = CachePlan(f"transformers has no class that generates text with a {type(config).__name__}")
    else:
        caches = planned(name, model_class, config)
    dtype = dtype_of(config)
    facts |= {"reason": caches.reason, "batch": batch, "tokens": tokens, "page_size": page_size_of(settings)}
    facts |= {"dtype": str(dtype).removeprefix("torch."), "widths": "", "weights": None, "smallest": None}
    if model_class is not None:
        with suppress(Exception):  # any error: the model's own code runs without values
            facts |= _weights(model_class, config, dtype.itemsize, facts["page_size"])
    halves = [caches.layers, caches.cross]
    widths: list[list[Widths | None]] = [[None] * len(half) for half in halves]
    if caches.elastic and model_class is not None:
        try:
            widths = [widths_of(cache) for cache in run_without_values(model_class, config)]
        except Exception as error:  # any error: the model's own code runs without values
            facts["widths"] = f"known with the first token: {type(error).__name__}: {_first_line(error)}"
    rows = [
        {"cross": half is caches.cross, **row}
        for half, theirs in zip(halves, widths, strict=False)
        for row in _rows(half, theirs, facts, config, dtype.itemsize)
    ]
    sizes = [row.get("bytes") for row in rows if row["elastic"]]
    way, why = ("eager", facts["reason"]) if model_class is None else foreseen(model_class, config)
    facts["pieces"] = {"way": way, "why": why}
    return facts | {"bytes": None if None in sizes else sum(filter(None, sizes)), "layers": rows}


def show(facts: Facts) -> None:
    """Prints the facts of `gather` for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{facts['model']}: {facts['class'] or facts['type']}", highlight=False)
    if facts["weights"] is not None:
        weights, smallest = format_size(facts["weights"]), format_size(facts["smallest"])
        console.print(
            f"Weights: {weights} as {facts['dtype']}. The device must have {smallest} of them, if all layers stream "
            "from host memory; KV and activations come on top.",
            highlight=False,
        )
    way, why = facts["pieces"]["way"], facts["pieces"]["why"]
    console.print(f"Decoding on a GPU: {_DECODING[way]}{f' ({why})' if why else ''}.", highlight=False, markup=False)
    if facts["reason"]:
        console.print(f"[yellow]Nothing of its cache is elastic:[/] {facts['reason']}.")
        return
    asked = f"{facts['batch']} x {facts['tokens']}"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("layers", "elastic", "a token", "to a range", asked, "tokens at most"):
        table.add_column(column, justify="right")
    for row in facts["layers"]:
        elastic = "[green]yes[/]" if row["elastic"] else "[yellow]no[/]"
        table.add_row(row["layer"], f"{len(row['indices'])}", elastic, *_numbers(row))
    console.print(table)
    for row in facts["layers"]:
        cross = ", cross-attention" * row["cross"]
        console.print(f"{row['layer']} ({_spans(row['indices'])}{cross}) {row['why']}.", highlight=False)
    if facts["widths"]:
        console.print(f"How wide keys and values are is {facts['widths']}.")
    elif not any(row["elastic"] for row in facts["layers"]):
        console.print("No layer of it is elastic.")
    elif facts["bytes"] is not None:
        page = format_size(facts["page_size"])
        console.print(f"{format_size(facts['bytes'])} of elastic KV in pages of {page}, as {facts['dtype']}.")
        if facts["weights"] is not None:
            whole = format_size(facts["weights"] + facts["bytes"])
            console.print(
                f"All on the device, weights and KV of {asked} tokens take {whole}. Less may do: `ballonet plan "
                f"{facts['model']} --context {facts['tokens']} --batch {facts['batch']}` says how much, and how fast.",
                highlight=False,
                markup=False,
            )
    if any("longest" in row and row["longest"] < facts["tokens"] for row in facts["layers"]):
        console.print("With more tokens than that a layer is stock: attention kernels would count beyond 32 bits.")


def planned(name: str, model_class: type, config: Any) -> CachePlan:
    """Returns the plan of such a model's cache. ConfigError where its configuration is incomplete."""
    try:
        return plan(model_class, config)
    except BallonetError:
        raise
    except Exception as error:  # any error: transformers' code on an incomplete configuration
        raise ConfigError(
            f"{name}: {model_class.__name__} prepares no cache for this configuration: {error}"
        ) from error


def _weights(model_class: type, config: Any, itemsize: int, page: int) -> Facts:
    """Returns the bytes of all parameters and buffers, each once. `itemsize`: of an element of a floating dtype."""
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    seen: set[int] = set()

    def nbytes(module: nn.Module) -> int:
        tensors = {
            id(parameter): parameter
            for parameter in (*module.parameters(), *module.buffers())
            if id(parameter) not in seen
        }
        seen.update(tensors)
        return sum(
            tensor.numel() * (itemsize if tensor.is_floating_point() else tensor.element_size())
            for tensor in tensors.values()
        )

    layers = [nbytes(layer) for layer in decoder_layers(model)]
    outside = nbytes(model)
    pages = Fewest().smallest([-(-size // page) for size in layers]) if layers else 0
    return {"weights": sum(layers) + outside, "smallest": (-(-outside // page) + pages) * page}


def _rows(
    layers: Sequence[LayerPlan], widths: Sequence[Widths | None], facts: Facts, config: Any, itemsize: int
) -> Iterator[Facts]:
    """Yields a row for each set of layers that are alike."""
    alike: dict[tuple[LayerPlan, Widths | None], list[int]] = {}
    for index, kind in enumerate(zip(layers, widths, strict=True)):
        alike.setdefault(kind, []).append(index)
    for (layer, width), indices in alike.items():
        row: Facts = {"indices": indices, **asdict(layer)}
        if layer.elastic and width is not None:
            row |= dict(zip(("heads", "k_dim", "v_dim"), width, strict=True))
            row |= _sizes(CacheSizes(facts["batch"], *width, itemsize), len(indices), facts, config)
        yield row


def _sizes(sizes: CacheSizes, count: int, facts: Facts, config: Any) -> Facts:
    """Returns the sizes of `count` layers of one cache, which may share ranges."""
    tokens, page = facts["tokens"], facts["page_size"]
    most = longest(*sizes)
    geometry = geometry_for(
        sizes,
        count if one_shape(config) else 1,
        tokens,
        page,
        _UNLIMITED,
        longest_known=longest_sequence(config),
        expected=tokens,
        alone=False,
    )
    if geometry is None:
        return {"longest": most}
    return {
        "token_bytes": geometry.k_bytes + geometry.v_bytes,
        "layers_per_range": geometry.layers,
        "bytes": -(-count // geometry.layers) * geometry.pieces(tokens) * page,
        "longest": most,
    }


def widths_of(cache: DynamicCache) -> list[Widths | None]:
    """Returns the widths of every layer, None of those that hold no keys and values."""
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return [
        (keys.shape[1], keys.shape[3], values.shape[3])
        if keys is not None and values is not None and keys.dim() == values.dim() == 4
        else None
        for keys, values in pairs
    ]


def _spans(indices: Sequence[int]) -> str:
    """Formats indices as `0-4, 6-10`, or `0, 2 ... 24` where they are evenly spaced."""
    steps = {after - before for before, after in itertools.pairwise(indices)}
    if len(steps) == 1 and steps != {1} and len(indices) > 3:
        return f"{indices[0]}, {indices[1]} ... {indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _numbers(row: Facts) -> tuple[str, str, str, str]:
    """Formats the numbers of a row for `show`; empty where they are not known."""
    most = f"{row['longest']:,}" if "longest" in row else ""
    if "bytes" not in row:
        return "", "", "", most
    token = format_size(row["token_bytes"] * len(row["indices"]))
    return token, f"{row['layers_per_range']}", format_size(row["bytes"]), most


def dtype_of(config: Any) -> torch.dtype:
    """Returns the dtype of the weights, which is that of keys and values."""
    dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()


def page_size_of(settings: Config) -> int:
    """Returns the bytes of a page on this machine; on a GPU where there is no device."""
    try:
        kind = device_choice.choose(settings, torch.cuda.is_available()).kind
    except BallonetError:  # no device is needed to say what would be on one
        kind = "cuda"
    return device_choice.page_size(settings, kind)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def quiet() -> None:
    """Silences comments of transformers and torch on a configuration from which no model is built."""
    warnings.simplefilter("ignore")
    for name in ("transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
