"""A model that lends its pages, alone and beside one that borrows them: what that costs it (SwiftCache §3.5).

Two models are managed on one device. In each round the one that lends answers a prompt twice: once alone, when all
pages that it needs are free, and once after the other has answered so many prompts that what it keeps of them fills the
pool, and the reserve has run out, so that the answer begins with taking pages back. They speak in turns: computing side
by side is not what is measured. As in the paper (§5.2) the first token, before which the pages come back, and those
after it are told apart.
"""

from __future__ import annotations

from typing import Any

from budgets import OURS, page_size, unlimited
from common import Figure, Options, describe_few, report
from peer import Functions, begin, peers

LAYERS = {"cuda": (16, 12), "cpu": (16, 12), "tiny": (4, 2)}  # of the one that lends, and of the other
PROMPT = {"cuda": 16384, "cpu": 768, "tiny": 96}  # tokens
TOKENS = {"cuda": 64, "cpu": 32, "tiny": 6}
OTHERS = {"cuda": 24, "cpu": 12, "tiny": 6}  # prompts of the other in a round, at most
ROOM = {"cuda": 12 * 2**30, "cpu": 56 * 2**20, "tiny": 12 * 2**18}  # bytes beside all weights
ROUNDS = {"cuda": 5, "cpu": 5, "tiny": 1}
SLOWER = 1.10


def main() -> None:
    chosen = begin("lending", __doc__, functions)
    kind = chosen.kind
    with peers(__file__, chosen, (OURS,), {OURS: {"BALLONET_RESERVE": "0s"}}) as found:
        found[OURS].ask("round")  # in which everything is for the first time
        rounds = [found[OURS].ask("round") for _ in range(ROUNDS[kind])]
    alone, beside, first, first_beside, borrowed, back, differ = (
        Figure.of([float(each[name]) for each in rounds])
        for name in ("alone", "beside", "first", "first_beside", "borrowed", "back", "differ")
    )
    slower = Figure.ratio(beside, alone)
    row = [
        ("alone, ms per token", alone),
        ("beside, ms per token", beside),
        ("beside / alone", slower if chosen.tiny else slower.at_most(SLOWER)),
        ("alone, ms to the first", first),
        ("beside, ms to the first", first_beside),
        ("beside / alone", Figure.ratio(first_beside, first)),
        ("pages borrowed", borrowed),
        ("pages taken back", back),
        ("pages of a unit", rounds[-1]["unit"]),
        ("tokens that differ", differ.at_most(0)),
    ]
    lender, other = LAYERS[kind]
    title = f"lending pages: {PROMPT[kind]:,} tokens, {describe_few(chosen, lender)}, beside one with {other} layers"
    report(chosen, "lending", title, [row])


def functions(name: str, chosen: Options) -> Functions:
    pair = Pair(chosen)
    return {"round": pair.round}


class Pair:
    """Two managed models on one device, of which the first lends."""

    def __init__(self, chosen: Options) -> None:
        from llama import build, few

        import ballonet

        self._chosen, self._kind = chosen, chosen.kind
        ballonet.install(unlimited(chosen), page_size=page_size(chosen))
        self._models = [build(few(chosen, layers), chosen.device) for layers in LAYERS[self._kind]]
        self._managed = [ballonet.manage(each, prefix_cache=True) for each in self._models]
        weights = ballonet.stats().pages.weights * ballonet.stats().page_size
        ballonet.set_budget(weights + ROOM[self._kind])
        self._said = 0

    def round(self) -> dict[str, Any]:
        """ms, pages, and how many tokens were others beside the other model than alone."""
        for each in self._managed:
            assert each.prefixes is not None
            each.prefixes.clear()
        prompt = self._text(0)
        alone, first, tokens = self._say(0, prompt)
        lender, other = (each.prefixes for each in self._managed)
        assert lender is not None
        assert other is not None
        lender.clear()
        before = -1
        for _ in range(OTHERS[self._kind]):
            if other.pages == before:
                break
            before = other.pages
            self._said += 1
            self._say(1, self._text(self._said))
        borrowed, held = self._managed[1].report().lending.borrowed, self._held()
        beside, first_beside, same = self._say(0, prompt)
        return {
            "alone": alone,
            "beside": beside,
            "first": first,
            "first_beside": first_beside,
            "borrowed": borrowed,
            "back": held - self._held(),
            "unit": self._managed[0].report().lending.unit,
            "differ": sum(a != b for a, b in zip(tokens, same, strict=True)),
        }

    def _held(self) -> int:
        """Pages that caches of the other have, its own and what it borrowed."""
        found = self._managed[1].report().lending
        return found.reserve + found.borrowed

    def _say(self, which: int, prompt: Any) -> tuple[float, float, list[int]]:
        """ms per token after the first, ms to that, the tokens."""
        from statistics import mean

        from generating import said

        clock, tokens = said(self._models[which], prompt, TOKENS[self._kind], self._chosen.device)
        first, *later = clock.gaps()
        return mean(later), first, tokens

    def _text(self, seed: int) -> Any:
        from generating import words

        return words(self._models[0], (1, PROMPT[self._kind]), seed)


if __name__ == "__main__":
    main()
