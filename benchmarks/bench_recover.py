"""Pressure comes and goes: a token of `generate()` before it, under it, and in the steady state afterwards.

A model decodes from a long cache with everything resident. Then the budget shrinks until part of its weights and of its
cache is on the host, it goes on decoding, and the budget is what it was before. What is away is restored while it
decodes. Then what was prepared for next time, host copies of resident layers, is kept for a minute; once it is gone,
too, its tokens should take as long as at first. Meanwhile a machine changes its speed by more than what is
looked for: so all is measured in turn with the same model in a process that never felt any pressure, and what counts
is by how much the ratio of the two has grown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from budgets import LAYERS, OURS
from common import Figure, Options, describe_few, report
from peer import Functions, Peer, begin, in_turns, peers
from streamed import WARM

if TYPE_CHECKING:
    from transformers import DynamicCache

    from ballonet import Managed

HELD = {"cuda": (4, 8192), "cpu": (4, 1024), "tiny": (2, 256)}  # sequences, tokens of each
SMALLER = {"cuda": 0.75, "cpu": 0.75, "tiny": 0.92}  # the budget, of what everything takes
TOKENS = {"cuda": 24, "cpu": 24, "tiny": 6}
ROUNDS = {"cuda": 7, "cpu": 7, "tiny": 1}  # before, and as many afterwards
CYCLES = {"cuda": 2, "cpu": 3, "tiny": 1}
PATIENCE = {"cuda": 90.0, "cpu": 90.0, "tiny": 0.1}  # s until everything is resident, or gone
SLOWER = 1.02
ONCE = {"away", "budget", "decided"}  # of the last cycle only
UNTOUCHED = "untouched"  # the peer whose budget stays


def main() -> None:
    chosen = begin("recover", __doc__, functions)
    kind = chosen.kind
    with peers(__file__, chosen, (OURS, UNTOUCHED)) as started:
        cycles = [cycle(started, ROUNDS[kind]) for _ in range(CYCLES[kind])]
    found = {name: Figure.of([each[name] for each in cycles]) for name in cycles[0] if name not in ONCE}
    grown, left = found["steady grown"], found["left"]
    layers, pages = cycles[-1]["away"]
    row = [
        ("budget, of what all takes", round(cycles[-1]["budget"], 2)),
        ("resident, ms per token", found["before"]),
        ("under pressure", found["pressed"]),
        ("times slower", Figure.of([each["pressed"] / each["before"] for each in cycles])),
        ("once all is resident", found["again"]),
        ("grown by", found["again grown"]),
        ("steady state", found["steady"]),
        ("grown by", grown if chosen.tiny else grown.at_most(SLOWER)),
        ("s until all is resident", found["again s"]),
        ("s until no host copy is left", found["copies s"]),
        ("layers away, pages of KV away", f"{layers}, {pages}"),
        ("of them not resident", left if chosen.tiny else left.at_most(0)),
        ("what gave pages", cycles[-1]["decided"]),
    ]
    batch, length = HELD[kind]
    title = f"after the pressure: {batch} x {length} tokens held, {describe_few(chosen, LAYERS[kind])}"
    report(chosen, "recover", title, [row])


def cycle(found: Mapping[str, Peer], rounds: int) -> dict[str, Any]:
    """Pressure comes and goes once, for one of the two."""
    for peer in found.values():
        peer.ask("begin")

    times = {"before": in_turns(found, rounds, "decode")}
    said = found[OURS].ask("press")
    for name, wait in {"again": "ease", "steady": "forget"}.items():
        said |= found[OURS].ask(wait)
        times[name] = in_turns(found, rounds, "decode")
    first = times["before"][OURS].median / times["before"][UNTOUCHED].median
    for name, each in times.items():
        said |= {name: each[OURS].median, f"{name} grown": each[OURS].median / each[UNTOUCHED].median / first}
    return said | {"left": float(sum(found[OURS].ask("away")))}


def functions(name: str, chosen: Options) -> Functions:
    kind = chosen.kind
    decoding = Decoding(chosen, HELD[kind], TOKENS[kind])
    return {
        "begin": decoding.begin,
        "decode": decoding.decode,
        "press": lambda: decoding.press(SMALLER[kind]),
        "ease": lambda: decoding.ease(PATIENCE[kind]),
        "forget": lambda: decoding.forget(PATIENCE[kind]),
        "away": decoding.away,
    }


class Decoding:
    """A model, its cache, and a budget that changes."""

    def __init__(self, chosen: Options, size: tuple[int, int], tokens: int) -> None:
        """`size`: sequences, tokens of each that the cache holds; `tokens`: that are decoded at a time."""
        from capped import Held

        self._held = Held(OURS, chosen)
        self._size, self._tokens = size, tokens
        self._cache: DynamicCache | None = None

    def begin(self) -> None:
        """All layers are resident, and a new cache holds so many tokens."""
        from llama import filled

        self._cache = None
        self._held.hold(None)
        self._held.settle()
        self._held.reset()
        self._cache = filled(OURS, self._held.model.config, *self._size, self._held.device)

    def decode(self, tokens: int | None = None) -> float:
        """ms per token: the median. The cache is as long afterwards as before."""
        from generating import Clock, timed

        assert self._cache is not None
        device = self._held.device
        clock = Clock(device)
        timed(self._held.model, self._cache, self._size, device, tokens or self._tokens, clock)
        self._cache.crop(self._size[1] - self._cache.get_seq_length())
        return clock.ms(WARM - 1)

    def press(self, smaller: float) -> dict[str, Any]:
        """The budget is that part of what all takes, or as near as it comes: ms per token, and what is away."""
        from capped import decided

        import ballonet

        _, most = self._held.memory()
        before = ballonet.stats()
        budget = self._held.press(round(smaller * most), lambda: self.decode(WARM + 1))
        pressed = self.decode()
        return {"pressed": pressed, "budget": budget / most, "away": self.away(), "decided": decided(before)}

    def ease(self, patience: float) -> dict[str, float]:
        """The budget is what it was: s until all is resident."""
        self._held.hold(None)
        return {"again s": self._until(lambda: not any(self.away()), patience)}

    def forget(self, patience: float) -> dict[str, float]:
        """The layers are as if they had never been taken: s until then."""
        return {"copies s": self._until(lambda: self._managed.report().host_pages == 0, patience)}

    def _until(self, done: Callable[[], bool], patience: float) -> float:
        begin = time.monotonic()
        while not done() and time.monotonic() - begin < patience:
            self.decode(WARM + 1)
        return time.monotonic() - begin

    @property
    def _managed(self) -> Managed:
        assert self._held.managed is not None
        return self._held.managed

    def away(self) -> tuple[int, int]:
        """Layers, and pages of the cache, that are on the host."""
        from ballonet.hooks.kv.layer import ElasticLayer

        assert self._cache is not None
        found = [layer._range for layer in self._cache.layers if isinstance(layer, ElasticLayer)]
        ranges = {each.range.address: each.range for each in found if each is not None}
        where = (each.leads_to(piece) for each in ranges.values() for piece in range(each.pieces))
        return len(self._managed.report().streamed), sum(each in ("alias", "host") for each in where)


if __name__ == "__main__":
    main()
