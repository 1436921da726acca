"""The output of `ballonet profile MODEL`: times of iterations, speed of the link, intervals without delay.

The model is loaded, managed and measured (profile.py); the rest is computed from its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from torch import nn

from ...allocator import devices, install
from ...allocator.errors import ManageError
from ...offload.policy.plan import Costs, meeting
from ...offload.policy.tuning import DEFAULT
from ...offload.record.record import Phase, Record, intervals, on_grid
from ..loading import has_weights, load_or_draw
from ..manage import manage
from ..managed import pace_of, residency_of
from ..profile import Grid, load_or_measure
from ..weights.model_parts import decoder_layers

Facts = dict[str, Any]


def gather(
    name: str,
    budget: str | None,
    grid: Grid | None,
    ttft_slo: float | None,
    tpot_slo: float | None,
    *,
    force: bool = False,
) -> Facts:
    """Returns plain values, ready for JSON. `name`: a folder or a name on the hub. SLOs in seconds. ConfigError, and
    the errors of `load_or_draw` and `load_or_measure`.

    Keys: model (its class), drawn (whether its weights are random, as it has none), key (of the record), file,
    reused (whether nothing had to be measured), bandwidth (bytes per second), entering (seconds
    that the host takes for each layer that streams), page_size, layers (pages of each),
    streamed (the layers that did not fit), points: a list of {phase, batch, length, seconds, ratio (time to copy
    the mean layer over its time to compute), hidden (the smallest interval that adds no more than 3 %; the number
    of layers + 1: none does)}, left: a list of {batch, length, why}, slos: a list of {phase, slo, listed (the
    multiple of 2 ms below it), intervals: [[batch, length, the smallest that meets it, or None]]}.
    """
    if devices.current() is None:
        install.install(budget)
    model = load_or_draw(name)
    managed, device = manage(model), devices.require()
    streamed = managed.report().streamed
    profile = load_or_measure(model, pace_of(managed), device, grid, force=force, residency=residency_of(managed))
    record, page = profile.record, device.page_size
    slos: tuple[tuple[Phase, float | None], ...] = ("prefill", ttft_slo), ("decode", tpot_slo)
    pages, timed = layer_pages(model, page), {"prefill": "prefill", "decode": record.decoding}
    return {
        "model": type(model).__name__,
        "drawn": not has_weights(name),
        "key": dict(record.key),
        "file": str(profile.path),
        "reused": profile.reused,
        "bandwidth": record.bandwidth,
        "entering": record.entering,
        "page_size": page,
        "layers": list(pages),
        "streamed": list(streamed),
        "points": list(_points(record, pages, page)),
        "left": [{"batch": batch, "length": length, "why": why} for (batch, length), why in profile.left.items()],
        "slos": [
            {
                "phase": phase,
                "slo": slo,
                "listed": on_grid(slo),
                "intervals": [[*size, i] for size, i in intervals(record, timed[phase], pages, page, slo).items()],
            }
            for phase, slo in slos
            if slo is not None
        ],
    }


def show(facts: Facts, outlook: str, *, verbose: bool = False) -> None:
    """Prints the facts of `gather` for people, and last what they mean, `outlook`. `verbose`: how long layers take to
    copy beside that, and which sizes were left out, too."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    key, layers = facts["key"], len(facts["layers"])
    console.print(f"{facts['model']}, {key['size']} in {layers} decoder layers, on {key['device']}")
    if facts["drawn"]:
        console.print("weights: drawn at random, as there are none")
    console.print(f"link: {facts['bandwidth'] / 1e9:.3g} GB/s ({key['link']})")
    for phase in get_args(Phase):
        rows = [fact for fact in facts["points"] if fact["phase"] == phase]
        if not rows:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in (phase, "tokens", "ms", *("copy / compute", "hidden at interval") * verbose):
            table.add_column(column, justify="right")
        for row in rows:
            hidden = "none" if row["hidden"] > layers else f"{row['hidden']}"
            ms = f"{row['seconds'] * 1e3:.4g}"
            table.add_row(f"{row['batch']}", f"{row['length']:,}", ms, *(f"{row['ratio']:.3g}", hidden) * verbose)
        console.print()
        console.print(table)
    for slo in facts["slos"]:
        console.print(f"\nsmallest interval for an SLO of {slo['slo'] * 1e3:.4g} ms, {slo['phase']}:")
        console.print(_table_1(slo, layers))
        console.print("n: every n-th layer streams; ∞: none may; no: it takes longer with every layer resident, too.")
        listed = f"{slo['listed'] * 1e3:.4g} ms"
        console.print(f"Counted for {listed}, and for the longest time measured of any size that is no larger.")
    console.print()
    for why in dict.fromkeys(fact["why"] for fact in facts["left"]):
        sizes = [f"{fact['batch']} x {fact['length']:,}" for fact in facts["left"] if fact["why"] == why]
        named = ", ".join(sizes) if verbose or len(sizes) == 1 else f"{len(sizes)} sizes, {sizes[0]} and more"
        console.print(f"Not measured: {named} tokens ({why}).")
    console.print(f"{'Read from' if facts['reused'] else 'Kept in'} {facts['file']}", soft_wrap=True)
    console.print()
    console.print(outlook, markup=False)


def layer_pages(model: nn.Module, page_size: int) -> tuple[int, ...]:
    """Pages of each decoder layer."""
    sizes = []
    for layer in decoder_layers(model):
        nbytes = {id(tensor): tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers())}
        sizes.append(-(-sum(nbytes.values()) // page_size))
    return tuple(sizes)


def _points(record: Record, pages: Sequence[int], page_size: int) -> Iterator[Facts]:
    if not pages:
        raise ManageError("the model has no decoder layers that could stream")
    for point in sorted(record.seconds, key=lambda second: (get_args(Phase).index(second.phase), second)):
        costs = Costs(tuple(pages), record.seconds[point], page_size / record.bandwidth, record.entering)
        yield {
            **point._asdict(),
            "seconds": costs.seconds,
            "ratio": float(costs.ratio),
            "hidden": meeting(costs, costs.seconds * (1 + DEFAULT.prices.hidden)),
        }


def _table_1(slo: Facts, layers: int) -> Any:
    """Makes the paper's Table 1: rows are batch sizes, columns lengths."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = {(batch, length): interval for batch, length, interval in slo["intervals"]}
    lengths = sorted({length for _, length in cells})
    for column in ("batch", *(f"{length:,}" for length in lengths)):
        table.add_column(column, justify="right")
    for batch in sorted({batch for batch, _ in cells}):
        row = (_cell(cells.get((batch, length)), (batch, length) in cells, layers) for length in lengths)
        table.add_row(f"{batch}", *row)
    return table


def _cell(interval: int | None, listed: bool, layers: int) -> str:
    if not listed:
        return ""
    return "no" if interval is None else "∞" if interval > layers else f"{interval}"
