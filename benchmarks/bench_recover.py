"""Pressure comes and goes: a token of `generate()` before it, under it, and in the steady state afterwards.

A model decodes from a long cache with everything resident. Then the budget shrinks until part of its weights and of its
cache is on the host, it goes on decoding, and the budget is what it was before. What is away comes home while it
decodes; once nothing is, its tokens should take as long as at first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from budgets import LAYERS, OURS, kind_of
from common import Figure, Options, describe_few, options, report
from peer import peers, serve, synchronize
from streamed import WARM

if TYPE_CHECKING:
    from capped import Held
    from transformers import DynamicCache

HELD = {"cuda": (4, 8192), "cpu": (4, 1024), "tiny": (2, 256)}  # sequences, tokens of each
SMALLER = {"cuda": 0.75, "cpu": 0.75, "tiny": 0.92}  # the budget, of what everything takes
TOKENS = {"cuda": 24, "cpu": 24, "tiny": 6}
CYCLES = {"cuda": 3, "cpu": 2, "tiny": 1}
PATIENCE = {"cuda": 30.0, "cpu": 30.0, "tiny": 0.1}  # s until everything is home
SLOWER = 1.02
COLUMNS = [
    "budget, of what all takes",
    "resident, ms per token",
    "under pressure",
    "times slower",
    "afterwards",
    "afterwards / resident",
    "s until all is home",
    "layers away, pages of KV away",
    "of them not home",
    "what gave pages",
]


def main() -> None:
    chosen = options("recover", __doc__)
    kind = kind_of(chosen)
    if chosen.peer is not None:
        serve(functions(chosen.peer, chosen))
        return
    with peers(__file__, chosen, (OURS,)) as found:
        cycles = [found[OURS].ask("cycle") for _ in range(CYCLES[kind])]
    resident, pressed, later, home, left = (
        Figure.of([each[name] for each in cycles]) for name in ("resident", "pressed", "later", "home", "left")
    )
    away = cycles[-1]["away"]
    row = [
        round(cycles[-1]["budget"], 2),
        resident,
        pressed,
        Figure.ratio(pressed, resident),
        later,
        Figure.of([each["later"] / each["resident"] for each in cycles]).at_most(SLOWER),
        home,
        f"{away[0]}, {away[1]}",
        left if chosen.tiny else left.at_most(0),
        cycles[-1]["decided"],
    ]
    batch, length = HELD[kind]
    title = f"after the pressure: {batch} x {length} tokens held, {describe_few(chosen, LAYERS[kind])}"
    report(chosen, "recover", title, COLUMNS, [row])


def functions(name: str, chosen: Options) -> Mapping[str, Callable[..., Any]]:
    """What a peer answers, see peer.serve()."""
    from capped import Held

    held, kind = Held(name, chosen), kind_of(chosen)
    return {"cycle": lambda: cycle(held, HELD[kind], SMALLER[kind], TOKENS[kind], PATIENCE[kind])}


def cycle(held: Held, size: tuple[int, int], smaller: float, tokens: int, patience: float) -> dict[str, Any]:
    """ms per token, s until all was home, and what was away."""
    from capped import decided
    from llama import filled

    import ballonet

    held.hold(None)
    held.settle()
    held.reset()
    cache = filled(OURS, held.model.config, *size, held.device)
    resident = decode(held, cache, size, tokens)
    _, most = held.memory()
    before = ballonet.stats()
    budget = held.press(round(smaller * most), lambda: decode(held, cache, size, WARM + 1))
    pressed = decode(held, cache, size, tokens)
    away = (len(layers_away(held)), pages_away(cache))
    text = decided(before)
    held.hold(None)
    begin = time.monotonic()
    while (layers_away(held) or pages_away(cache)) and time.monotonic() - begin < patience:
        decode(held, cache, size, WARM + 1)
    home = time.monotonic() - begin
    return {
        "resident": resident,
        "budget": budget / most,
        "pressed": pressed,
        "later": decode(held, cache, size, tokens),
        "home": home,
        "away": away,
        "left": float(len(layers_away(held)) + pages_away(cache)),
        "decided": text,
    }


def layers_away(held: Held) -> tuple[int, ...]:
    assert held.managed is not None
    return held.managed.streamed


def pages_away(cache: DynamicCache) -> int:
    """Of the cache, on the host."""
    from ballonet.hooks.kv.layer import ElasticLayer

    homes = [layer._home for layer in cache.layers if isinstance(layer, ElasticLayer)]
    ranges = {home.range.address: home.range for home in homes if home is not None}
    return sum(each.backing(piece) in ("alias", "host") for each in ranges.values() for piece in range(each.pieces))


def decode(held: Held, cache: DynamicCache, size: tuple[int, int], tokens: int) -> float:
    """ms per token: the median. The cache is as long afterwards as before."""
    from statistics import median

    from generating import Clock, timed

    clock = timed(held.model, cache, size, held.device, tokens, Clock(lambda: synchronize(held.device), int))
    cache.crop(size[1] - cache.get_seq_length())
    times = clock.times[WARM - 1 :]
    return median(b - a for a, b in pairwise(times)) * 1e3


if __name__ == "__main__":
    main()
