"""Time per token while layers stream from the host, against what is possible: the longer of computing and copying.

The bound is the larger of the time with every layer resident and of the bytes that a token brings over the link, at the
bandwidth that the link gives large copies in the same run. Predicted is the schedule (offload/policy/schedule.py), from
the resident time and the link as measured. On a GPU there is another: accelerate, stock with every second layer on the
host. The stand-in's link is slowed to 2 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from harness import MIB, Benchmark, Figure, Functions, Options, Peer, answering, interleaved, main, peers, report
from models import (
    OURS,
    WARM,
    Clock,
    build,
    describe,
    environment,
    filled,
    interval_of,
    is_managed,
    layer_page_size,
    or_link,
    streamable,
    synchronize,
    timed,
    titled,
)
from transformers import PreTrainedModel

import ballonet
from ballonet.offload.policy.plan import Costs

INTERVALS = {"cuda": (8, 4, 2, 1), "cpu": (8, 4, 2, 1), "tiny": (2,)}
OTHER, AS_MANY = "accelerate", 2  # the interval that streams as many layers
ROUNDS = {"cuda": 2, "cpu": 3, "tiny": 1}  # each of several tokens
TOKENS = {"cuda": WARM + 4, "cpu": WARM + 3, "tiny": WARM + 2}  # of a round; accelerate is slow, and has those of tiny
CASES = {"cuda": ((1, 1024), (8, 4096)), "cpu": ((1, 256),), "tiny": ((1, 16),)}  # sequences, tokens of each
OVER_BOUND, PREDICTED, FASTER = 1.03, 0.1, 9.0


def streaming(chosen: Options) -> None:
    kind = chosen.kind
    ours = ("resident", *(f"interval {interval}" for interval in INTERVALS[kind]))
    names = (*ours, "link", *((OTHER,) if chosen.cuda else ()))
    rows = []
    with peers(chosen, names, dict.fromkeys(names, environment(chosen))) as started:
        able = answering(started, (*ours, "link"), "about")
        about = able[ours[-1]].ask("about")
        for case in CASES[kind][: chosen.cases]:
            rows += rows_of(case, able, about, chosen)
    report(chosen, titled(chosen, f"decoding while layers stream: ms per token, {about['what']}"), rows)


def rows_of(
    case: tuple[int, int], able: Mapping[str, Peer], about: Mapping[str, Any], chosen: Options
) -> list[dict[str, Any]]:
    """Measures the peers in turn. `about`: see `functions`."""
    batch, held = case
    answers: dict[str, dict[str, Any]] = {}
    back = dict.fromkeys(able, 0)

    def decode(name: str) -> float:
        tokens = TOKENS["tiny" if name == OTHER else chosen.kind]
        answers[name] = able[name].ask("decode", batch=batch, held=held, tokens=tokens)
        back[name] += answers[name]["back"]
        return float(answers[name]["ms"])

    turns = {name: lambda name=name: decode(name) for name in able if name != "link"}
    rounds = min(chosen.rounds or ROUNDS[chosen.kind], ROUNDS[chosen.kind])
    taken = interleaved({**turns, "link": lambda: float(able["link"].ask("link"))}, rounds)
    link, resident = taken.pop("link").median, taken["resident"].median
    costs = Costs((1,) * about["layers"], resident / 1e3, about["layer"] / link)
    rows = []
    for name, ms in taken.items():
        nbytes, interval = answers[name]["bytes"], interval_of(name)
        bound = max(resident, nbytes / link * 1e3)
        over, off, faster = Figure.of([ms.median / bound]), None, None
        if interval is not None:
            off = Figure.of([abs(ms.median / 1e3 / costs.expected(costs.plan(interval)) - 1)])
            if chosen.cuda:
                over, off = over.at_most(OVER_BOUND), off.at_most(PREDICTED)
            if interval == AS_MANY and OTHER in taken:
                faster = Figure.ratio(taken[OTHER], ms).at_least(FASTER)
        rows.append(
            {
                "sequences": batch,
                "tokens held": held,
                "what streams": name,
                "ms per token": ms,
                "MiB per token": round(nbytes / MIB, 1),
                "bound, ms": round(bound, 1) if is_managed(name) else "",
                "ms / bound": over if is_managed(name) else "",
                "off the prediction by": off or "",
                "accelerate / it": faster or "",
                "bytes to the host": "" if interval is None else Figure.of([float(back[name])]).at_most(0),
            }
        )
    return rows


def functions(peer: str, chosen: Options) -> Functions:
    """What a peer answers. Of a layer that streams "about" tells the bytes."""
    managed = None
    if is_managed(peer):
        ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=layer_page_size(chosen))
    model = build(streamable(chosen), chosen.device)
    if is_managed(peer):
        managed = ballonet.manage(model, interval=interval_of(peer))
    elif peer == OTHER:
        every_second_on_the_host(model)

    def decode(batch: int, held: int, tokens: int) -> dict[str, Any]:
        return decoded(peer, model, chosen.device, batch, held, tokens)

    about = {"what": describe(chosen), "layers": model.config.num_hidden_layers, "layer": 0}
    if managed is not None and managed.report().streamed:
        about["layer"] = managed.report().host_pages * ballonet.stats().page_size // len(managed.report().streamed)
    return {"about": lambda: about, "decode": decode}


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


def wait(device: str) -> None:
    """For the current stream, and not for copies of others."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def decoded(peer: str, model: PreTrainedModel, device: str, batch: int, held: int, tokens: int) -> dict[str, Any]:
    """`generate()` with a cache that holds so many tokens. ms per token: the median; bytes of weights per token, and
    those that went back to the host."""
    cache = filled(OURS if is_managed(peer) else peer, model.config, batch, held, device)
    before = copied(peer)
    clock = timed(model, cache, (batch, held), device, tokens, Clock(device, wait=wait))
    synchronize(device)
    after = copied(peer)
    return {
        "ms": median(clock.gaps(WARM - 1)),
        "bytes": (after["weights_h2d"] - before["weights_h2d"]) / tokens,
        "back": after["weights_d2h"] - before["weights_d2h"],
    }


def copied(peer: str) -> Mapping[str, int]:
    return dict(ballonet.stats().copied) if is_managed(peer) else {"weights_h2d": 0, "weights_d2h": 0}


BENCHMARKS = {"streaming": Benchmark(streaming, or_link(functions))}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
