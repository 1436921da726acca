"""Time to the first token of a turn with so many tokens of history: by what is done with what was said before.

Peers
    by hand      stock, a `DynamicCache` that is held between the calls and cut to what the next prompt shares
    offloaded    the same with transformers' `OffloadedCache`, where it runs
    recompute    stock, everything computed again
    device       managed with `prefix_cache=True`: the store has it on the device
    host         the same, after the budget was so low for a moment that what is stored went to the host
    link         large copies from pinned memory to the device, and nothing else

Each turn is a plain `generate()` of history and a new question, the same for all; the history was computed before. Its
tokens are compared with those of the cache held by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common import Figure, Options, describe, interleaved, options, report
from peer import Peer, answering, peers, serve
from streamed import LINK, MIB

# tokens of history, and what is asked beside it; the last one is what the limit for recomputing is for
HISTORY = {"cuda": (2048, 8192, 32768), "cpu": (512, 2048), "tiny": (64,)}
QUESTION = {"cuda": 64, "cpu": 32, "tiny": 8}  # tokens
TOKENS = 4  # of an answer
ROUNDS = {"cuda": 5, "cpu": 3, "tiny": 1}
OVER_HAND = 1.05
OVER_BOUND = 1.1
FASTER = 10  # than computing all of it, with the longest history on a GPU
NEEDED = ("by hand", "recompute", "device", "host", "link")
COLUMNS = [
    "history, tokens",
    "by hand, ms",
    "on the device",
    "device / by hand",
    "on the host",
    "MiB on the host",
    "host / max(compute, link)",
    "OffloadedCache",
    "recomputed",
    "recomputed / device",
    "tokens reused",
    "answers that differ",
]


def main() -> None:
    chosen = options("prefix", __doc__)
    if chosen.peer is not None:
        serve(functions(chosen.peer, chosen))
        return
    kind = "tiny" if chosen.tiny else chosen.device
    names = (*NEEDED, *(("offloaded",) if chosen.cuda else ()))
    slow = {} if chosen.cuda else dict.fromkeys(("host", "link"), LINK)
    with peers(__file__, chosen, names, slow) as started:
        rows = [row(history, started, chosen, kind) for history in HISTORY[kind]]
    title = f"time to the first token of a turn, {describe(chosen)}, {QUESTION[kind]} new tokens"
    report(chosen, "prefix", title if chosen.cuda else f"{title}, link of the stand-in 2 GB/s", COLUMNS, rows)


def row(history: int, started: Mapping[str, Peer], chosen: Options, kind: str) -> list[Any]:
    """Measures all with a history of that many tokens."""
    talking = {name: peer for name, peer in started.items() if name != "link"}
    found = answering(talking, NEEDED, "begin", history=history, question=QUESTION[kind])
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in found}

    def turn(name: str) -> float:
        answers[name].append(found[name].ask("turn", number=len(answers[name])))
        ms: float = answers[name][-1]["ms"]
        return ms

    turns: dict[str, Callable[[], float]] = {name: lambda name=name: turn(name) for name in found}
    taken = interleaved({**turns, "link": lambda: float(started["link"].ask("link"))}, ROUNDS[kind])
    away = max(each["away"] for each in answers["host"])
    bound = max(taken["device"].median, away / taken["link"].median * 1e3)
    limited = not chosen.tiny
    hand = Figure.ratio(taken["device"], taken["by hand"])
    host = Figure.of([taken["host"].median / bound])
    faster = Figure.ratio(taken["recompute"], taken["device"])
    longest = chosen.cuda and history == HISTORY[kind][-1]
    differ = sum(
        mine["tokens"] != theirs["tokens"]
        for name in ("device", "host")
        for mine, theirs in zip(answers[name], answers["by hand"], strict=True)
    )
    return [
        history,
        taken["by hand"],
        taken["device"],
        hand.at_most(OVER_HAND) if limited else hand,
        taken["host"],
        round(away / MIB, 1),
        host.at_most(OVER_BOUND) if limited else host,
        taken.get("offloaded", "not here"),
        taken["recompute"],
        faster.at_least(FASTER) if longest else faster,
        min(each["reused"] for name in ("device", "host") for each in answers[name]),
        Figure.of([float(differ)]).at_most(0),
    ]


def functions(peer: str, chosen: Options) -> Mapping[str, Callable[..., Any]]:
    """What a peer answers, see peer.serve()."""
    if peer == "link":
        from bandwidth import measure

        return {"link": measure(chosen)}
    from talking import Talk

    talk = Talk(peer, chosen, TOKENS)
    return {"begin": talk.begin, "turn": talk.turn}


if __name__ == "__main__":
    main()
