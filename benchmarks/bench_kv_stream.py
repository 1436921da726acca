"""Time per token while three quarters of the KV are on the host: streamed through slots layer by layer, or read in
place, and transformers' OffloadedCache, against what is possible: the longer of computing and copying.

The bound is the larger of the time with all KV resident and of the bytes that are away, at the bandwidth that the link
gives large copies in the same run. Each peer is a process with its own allocator and its own copy of the model. Its
budget is lowered until the pages are gone; what is done about that is its own choice, but for "in place", which has no
slots. The stand-in's link is slowed to 2 GB/s, and what it reads in place comes at the speed of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common import MIB, Figure, Options, interleaved, report
from peer import Functions, answering, begin, peers
from streamed import environment, page_size, titled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CASES = {"cuda": ((8, 16384), (1, 65536)), "cpu": ((1, 8192), (1, 16384)), "tiny": ((2, 1000),)}  # sequences, tokens
AWAY = 0.75
IN_PLACE = "in place"
LIMITS = {"through slots": 1.1, IN_PLACE: 1.2}
TOKENS, WARM = 10, 4


def main() -> None:
    chosen = begin("kv_stream", __doc__, functions)
    names = ("resident", *LIMITS, *(("OffloadedCache",) if chosen.cuda else ()), "link")
    rows = []
    with peers(__file__, chosen, names, dict.fromkeys(names, environment(chosen))) as started:
        found = answering(started, ("resident", "link"), "about")
        what = found["resident"].ask("about")["what"]
        for batch, held in CASES[chosen.kind]:
            rows += rows_of(found, batch, held, chosen)
    title = f"decoding with KV on the host: ms per token, {what}"
    report(chosen, "kv-stream", titled(chosen, title), rows)


def rows_of(found: dict[str, Any], batch: int, held: int, chosen: Options) -> list[dict[str, Any]]:
    answers: dict[str, dict[str, float]] = {}

    def decode(name: str) -> float:
        answers[name] = found[name].ask("decode", batch=batch, held=held)
        return answers[name]["ms"]

    turns = {name: lambda name=name: decode(name) for name in found if name != "link"}
    taken = interleaved({**turns, "link": lambda: float(found["link"].ask("link"))}, chosen.repetitions)
    link = taken.pop("link").median
    rows = []
    for name, ms in taken.items():
        answer = answers[name]
        bound = max(taken["resident"].median, answer["away"] / link * 1e3)
        over = Figure.of([ms.median / bound])
        if name in LIMITS and chosen.cuda and not chosen.tiny:
            over = over.at_most(LIMITS[name])
        how = name if chosen.cuda or name != IN_PLACE else f"{name}, at the speed of memory"
        rows.append(
            {
                "sequences": batch,
                "tokens held": held,
                "KV": how,
                "ms per token": ms,
                "MiB away": Figure.of([answer["away"] / MIB]),
                "MiB copied per token": Figure.of([answer["copied"] / MIB]),
                "bound, ms": Figure.of([bound]),
                "ms / bound": over,
            }
        )
    return rows


def functions(name: str, chosen: Options) -> Functions:
    from common import describe
    from llama import build, streamable

    import ballonet

    if name != "OffloadedCache":
        ballonet.install("80GiB" if chosen.cuda else "6GiB", page_size=page_size(chosen))
    model = build(streamable(chosen), chosen.device)
    if name == IN_PLACE:
        without_buffers()
    return {
        "about": lambda: {"what": describe(chosen)},
        "decode": lambda batch, held: decode(name, model, batch, held, chosen.device),
    }


def without_buffers() -> None:
    from ballonet.offload.governor.kv_read_plan import KVReadPlan
    from ballonet.offload.policy.layer_stream import Choice, Way

    KVReadPlan._choose = lambda *_: Choice(Way.ZERO_COPY, 0, 0, 0, 0.0, 0.0, 0.0)  # type: ignore[method-assign]


def decode(peer: str, model: PreTrainedModel, batch: int, held: int, device: str) -> dict[str, float]:
    """ms per token, bytes of KV on the host, bytes that came over the link for a token."""
    from contextlib import nullcontext

    from generating import Clock, timed
    from llama import filled
    from transformers import DynamicCache

    import ballonet

    ours = peer != "OffloadedCache"
    with ballonet.manage(model, interval=None) if ours else nullcontext():
        offloaded = None if ours else DynamicCache(config=model.config, offloading=True)
        cache = filled("ballonet" if ours else peer, model.config, batch, held, device, offloaded)
        budget = ballonet.stats().budget if ours else 0
        if ours and peer != "resident":
            lower(int(AWAY * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)))
        clock = Clock(device, lambda: ballonet.stats().copied.kv_h2d if ours else 0)
        timed(model, cache, (batch, held), device, TOKENS, clock)
        away = pages_away(cache) * ballonet.stats().page_size if ours else cache_bytes(cache)
        del cache
        if ours:
            ballonet.set_budget(budget)
    steps = TOKENS - WARM
    copied = (clock.counts[-1] - clock.counts[WARM - 1]) / steps
    return {"ms": clock.ms(WARM - 1), "away": away, "copied": copied}


def lower(nbytes: int) -> None:
    """The budget, until so many bytes that are used have to go."""
    import ballonet
    from ballonet.allocator import devices
    from ballonet.hooks.device import governors

    device = devices.require()
    device.trim()
    governors.of(device).reclaim.publish_now()
    used = sum(pages for owner, pages in device.snapshot()["pages"].items() if owner != "free")
    ballonet.set_budget(used * device.page_size - nbytes)


def pages_away(cache: Any) -> int:
    (tier,) = {id(layer._ranges): layer._ranges.tier for layer in cache.layers}.values()
    pages: int = tier.client.streamed.away
    return pages


def cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


if __name__ == "__main__":
    main()
