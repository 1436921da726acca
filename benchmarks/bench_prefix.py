"""Time to the first token of a turn with so many tokens of history: by what is done with what was said before.

Ways, and the process that goes them
    by hand      stock, a `DynamicCache` that is held between the calls and cut to what the next prompt shares
    offloaded    stock, the same with transformers' `OffloadedCache`, where it runs
    recompute    stock, everything computed again
    device       managed with `prefix_cache=True`: the store has it on the device
    host         the same, after the budget was so low for a moment that what is stored went to the host
    disk         the same, after the store has forgotten it: files have it (`prefix_dir`)
    peer         managed, in a process with a peer (`peer_budget`): as `host`, and what is stored went there
    link         large copies from pinned memory to the device, and nothing else

Each turn is a plain `generate()` of history and a new question, the same for all; the history was computed before. Its
tokens are compared with those of the cache held by hand. What holds a cache by hand has to cut it, and that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common import MIB, Figure, Options, describe, interleaved, report
from peer import Functions, Peer, PeerFailed, begin, peers
from streamed import LINK

HISTORY = {"cuda": (2048, 8192, 32768), "cpu": (1024, 2048, 4096), "tiny": (512,)}  # tokens
QUESTION = {"cuda": 64, "cpu": 32, "tiny": 8}  # tokens that are asked beside it
TOKENS = 4  # of an answer
ROUNDS = {"cuda": 5, "cpu": 3, "tiny": 1}
OVER_HAND = 1.05
OVER_BOUND = 1.1
FASTER = 10  # than computing all of it, with the longest history
PEER_LINK = {"BALLONET_PEER_LINK": "8GB/s"}  # of the stand-in
SPEEDS = "links of the stand-in 2 GB/s, to the peer 8 GB/s"
WAYS = {
    "by hand": "stock",
    "recompute": "stock",
    "offloaded": "stock",
    "device": "ballonet",
    "host": "ballonet",
    "disk": "ballonet",
    "peer": "peer",
}
OURS = ("device", "host", "disk", "peer")
SHIFT = {"host": 1, "disk": 2}  # of the questions in a round: the store of a process has just heard the last one


def main() -> None:
    chosen = begin("prefix", __doc__, functions)
    kind = chosen.kind
    slow = {} if chosen.cuda else {"ballonet": LINK, "link": LINK, "peer": LINK | PEER_LINK}
    with peers(__file__, chosen, ("stock", "ballonet", "peer", "link"), slow) as started:
        rows = [row(history, started, chosen, kind) for history in HISTORY[kind]]
    title = f"time to the first token of a turn, {describe(chosen)}, {QUESTION[kind]} new tokens"
    report(chosen, "prefix", title if chosen.cuda else f"{title}, {SPEEDS}", rows)


def row(history: int, started: Mapping[str, Peer], chosen: Options, kind: str) -> dict[str, Any]:
    """Measures all with a history of that many tokens."""
    ways = begun(history, started, chosen, kind)
    answers: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}

    questions = ROUNDS[kind] + 1

    def turn(way: str) -> float:
        number = (len(answers[way]) + SHIFT.get(way, 0)) % questions
        answers[way].append(started[WAYS[way]].ask("turn", way=way, number=number))
        ms: float = answers[way][-1]["ms"]
        return ms

    turns: dict[str, Callable[[], float]] = {way: lambda way=way: turn(way) for way in ways}
    taken = interleaved({**turns, "link": lambda: float(started["link"].ask("link"))}, ROUNDS[kind])
    away = max(each["away"] for each in answers["host"])
    bound = max(taken["device"].median, away / taken["link"].median * 1e3)
    limited = not chosen.tiny
    hand = Figure.ratio(taken["device"], taken["by hand"])
    host = Figure.of([taken["host"].median / bound])
    faster = Figure.ratio(taken["recompute"], taken["device"])
    differ = sum(
        mine["tokens"] != answers["by hand"][(number + SHIFT.get(way, 0)) % questions]["tokens"]
        for way in OURS
        for number, mine in enumerate(answers[way])
    )
    reused = (f"{way} {min(each['reused'] for each in answers[way]):,}" for way in OURS)
    return {
        "history, tokens": history,
        "by hand, ms": taken["by hand"],
        "on the device": taken["device"],
        "device / by hand": hand.at_most(OVER_HAND) if limited else hand,
        "on the host": taken["host"],
        "MiB on the host": round(away / MIB, 1),
        "host / max(compute, link)": host.at_most(OVER_BOUND) if limited else host,
        "on a peer": taken["peer"],
        "in files": taken["disk"],
        "OffloadedCache": taken.get("offloaded", "not here"),
        "recomputed": taken["recompute"],
        "recomputed / device": faster.at_least(FASTER) if limited and history == HISTORY[kind][-1] else faster,
        "tokens reused": ", ".join(reused),
        "answers that differ": Figure.of([float(differ)]).at_most(0),
    }


def begun(history: int, started: Mapping[str, Peer], chosen: Options, kind: str) -> list[str]:
    """All processes have the history; the ways that there are. PeerFailed."""
    given = {"history": history, "question": QUESTION[kind]}
    ways = [way for way in WAYS if way != "offloaded"]
    for name in ("ballonet", "peer"):
        started[name].ask("begin", ways=[], **given)
    if chosen.cuda:
        try:
            started["stock"].ask("begin", ways=["by hand", "offloaded"], **given)
            return list(WAYS)
        except PeerFailed as error:
            print(f"left out: {error}", flush=True)
    started["stock"].ask("begin", ways=["by hand"], **given)
    return ways


def functions(peer: str, chosen: Options) -> Functions:
    import talking

    return talking.functions(peer, chosen, TOKENS)


if __name__ == "__main__":
    main()
