"""What a turn of a conversation takes, by what is done with what was said before, and how often that is there.

prefix: time to the first token of a turn with so many tokens of history. Ways, and the process that goes them

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

hit-rate: how often a prefix cache has what requests begin with, by its size: the store's policy, least recently used,
the best there is with the future known (what is used again last goes first), and a cache that never evicts. For traces
made here, and any given by `--traces` (JSON lines with `hash_ids`). Those made here:

    conversations   begin one after another, each with one of a few system prompts, and go on for a while, a turn now
                    and then; each turn sends all that was said before
    pauses          conversations all alike, whose pauses have a heavy tail
    system prompts  one of many, popular by Zipf's law, and a question that is asked once
    agents          bursts of calls, each with all before it; some begin alike
    documents       popular ones, which others replace, with a few questions in a row
    one-off         conversations, and long prompts between them that nobody sends twice
    rounds          the same prompts in turn
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import MIB, Benchmark, Figure, Functions, Options, Peer, PeerFailed, interleaved, main, peers, report
from models import LINK, build, describe, or_link, page_size, said, shape, synchronize, words
from transformers import DynamicCache

import ballonet
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.compat import cache_name
from ballonet.hooks.prefix.store import PrefixStore
from ballonet.offload.policy.prefixes import Density, Hits, Index, Policy, Recency

# Turns

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
HELD = ("by hand", "offloaded")  # ways that hold a cache of stock's between calls
OURS = ("device", "host", "disk", "peer")
SHIFT = {"host": 1, "disk": 2}  # of the questions in a round: the store of a process has just heard the last one


def turns_of_talks(chosen: Options) -> None:
    kind = chosen.kind
    slow = {} if chosen.cuda else {"ballonet": LINK, "link": LINK, "peer": LINK | PEER_LINK}
    with peers(chosen, ("stock", "ballonet", "peer", "link"), slow) as started:
        rows = [row(history, started, chosen, kind) for history in HISTORY[kind]]
    title = f"time to the first token of a turn, {describe(chosen)}, {QUESTION[kind]} new tokens"
    report(chosen, title if chosen.cuda else f"{title}, {SPEEDS}", rows)


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
    away = max(answer["away"] for answer in answers["host"])
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
    reused = (f"{way} {min(answer['reused'] for answer in answers[way]):,}" for way in OURS)
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


class Talk:
    """One history, and turns that go on from it, each with a question of its own, by one of several ways."""

    def __init__(self, peer: str, chosen: Options, tokens: int) -> None:
        """`peer`: the process: "stock", "ballonet", or "peer", which has one to put KV on. `tokens`: of an answer."""
        self._chosen = chosen
        self._tokens = tokens
        self._budget = (48 if chosen.cuda else 6) * 2**30
        self._store: PrefixStore | None = None
        if peer != "stock":
            near = (8 if chosen.cuda else 2) * 2**30 if peer == "peer" else None
            ballonet.install(self._budget, page_size=page_size(chosen), peer_budget=near)
        self._model = build(shape(chosen), chosen.device)
        if peer != "stock":
            self._folder = TemporaryDirectory(prefix="ballonet-bench-") if peer == "ballonet" else None
            kept = {"prefix_dir": self._folder.name} if self._folder is not None else {}
            self._managed = ballonet.manage(self._model, prefix_cache=True, **kept)
            self._store = self._managed.prefixes
        self._caches: dict[str, DynamicCache] = {}
        self._history = torch.empty(1, 0, dtype=torch.int64)
        self._question = 0

    def begin(self, history: int, question: int, ways: list[str]) -> None:
        """Begins with a history of so many tokens, which are computed; each turn asks so many, by each of the ways."""
        self._history, self._question = self._text(history, seed=history), question
        self._caches.clear()
        if self._store is not None:
            self._store.clear()
            self._say(self._history, 1)
            self._store.flush()
        for way in ways:
            if way in HELD:
                self._caches[way] = DynamicCache(config=self._model.config, offloading=way == "offloaded")
                self._say(self._history, 1, self._caches[way])

    def turn(self, way: str, number: int) -> dict[str, Any]:
        """ms to the first token; the tokens; how many of the prompt were not computed; bytes off the device."""
        prompt = torch.cat([self._history, self._text(self._question, seed=1000 + number)], 1)
        if way in ("host", "peer"):
            self._away_from_the_device()
        if way == "disk" and self._store is not None:
            self._store.clear()
        before, away = self._reused(), self._bytes_away()
        ms, tokens = self._say(prompt, self._tokens, self._caches.get(way))
        return {"ms": ms, "tokens": tokens, "reused": self._reused() - before, "away": away}

    def _say(self, prompt: torch.Tensor, tokens: int, cache: DynamicCache | None = None) -> tuple[float, list[int]]:
        synchronize(self._chosen.device)
        begin = time.perf_counter()
        if cache is not None and cache.get_seq_length():
            cache.crop(self._history.shape[1] - cache.get_seq_length())
        more = {} if cache is None else {cache_name(self._model): cache}
        clock, found = said(self._model, prompt, tokens, self._chosen.device, **more)
        return (clock.times[1] - begin) * 1e3, found

    def _text(self, tokens: int, seed: int) -> torch.Tensor:
        return words(self._model, (1, tokens), seed)

    def _away_from_the_device(self) -> None:
        """As others who need its pages would do it: the budget is small for a moment."""
        try:
            while (found := ballonet.stats()).pages["kv"]:  # what is idle among activations goes first
                ballonet.set_budget((sum(found.pages.values()) - found.pages["kv"]) * found.page_size)
        except BudgetInUse as error:
            with suppress(BudgetInUse):
                ballonet.set_budget(error.smallest)
        ballonet.set_budget(self._budget)

    def _reused(self) -> int:
        return 0 if self._store is None else self._store.counts.hits

    def _bytes_away(self) -> int:
        if self._store is None:
            return 0
        found = ballonet.stats()
        return (found.host_pages + found.peer_pages) * found.page_size


def talking(peer: str, chosen: Options) -> Functions:
    talk = Talk(peer, chosen, TOKENS)
    return {"begin": talk.begin, "turn": talk.turn}


# Hits

TURNS = {False: 4000, True: 60}  # of a trace made here, about, by whether it is tiny
SIZES = (0.02, 0.05, 0.1, 0.25, 0.5)  # of the distinct blocks
AT = (10_000, 50_000)  # blocks, of large traces
Trace = list[list[int]]


def hit_rates(chosen: Options) -> None:
    turns = TURNS[chosen.tiny]
    traces = {name: make(turns) for name, make in MADE.items()} | {path.name: recorded(path) for path in chosen.traces}
    rows = [row for name, trace in traces.items() for row in measure(name, trace)]
    report(chosen, "blocks of prompts that a prefix cache has", rows)


def measure(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """A row for each size."""
    distinct = len({key for keys in trace for key in keys})
    unlimited = Figure.of([hits(trace, None, Recency()).hit_rate])
    for size in sorted({round(distinct * part) for part in SIZES} | {size for size in AT if size < distinct}):
        recency = hits(trace, size, Recency()).hit_rate
        yield {
            "trace": name,
            "requests": len(trace),
            "blocks stored, at most": size,
            "hit rate": Figure.of([hits(trace, size, Density()).hit_rate]).at_least(recency),
            "least recently used": Figure.of([recency]),
            "future known": Figure.of([hits(trace, size, Foresight(trace)).hit_rate]),
            "without a limit": unlimited,
        }


class Foresight(Recency):
    """Evicts the blocks that are used again last, or never."""

    def __init__(self, trace: Trace) -> None:
        self._uses = defaultdict[Hashable, deque[int]](deque)
        for request, keys in enumerate(trace):
            for key in keys:
                self._uses[key].append(request)
        self._never = len(trace)

    def used(self, key: Hashable) -> tuple[Hashable, int]:
        self._uses[key].popleft()
        return None, -next(iter(self._uses[key]), self._never)


def hits(trace: Trace, blocks: int | None, policy: Policy) -> Hits:
    """What a cache of so many blocks finds, any number if None: each request asks for its blocks, then stores them."""
    index = Index(blocks, policy)
    for request, keys in enumerate(trace):
        index.match(keys)
        index.insert(keys, request)
        index.evict(index.excess())
    return index.hits


def recorded(path: Path) -> Trace:
    """Returns the blocks of each request."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines() if line.strip()]


# Traces made here, of about so many turns. Seeded.


def fresh() -> Callable[[int], list[int]]:
    """Returns what makes so many new blocks."""
    numbers = count()
    return lambda blocks: [next(numbers) for _ in range(blocks)]


def by_time(requests: Sequence[tuple[float, list[int]]]) -> Trace:
    return [keys for _, keys in sorted(requests, key=lambda request: request[0])]


def by_popularity(random: Random, choices: int) -> int:
    return random.choices(range(choices), [1 / (rank + 1) for rank in range(choices)])[0]


def conversations(turns: int) -> Trace:
    random, new = Random(0), fresh()
    systems = [new(random.randrange(1, 12)) for _ in range(8)]
    talking: Trace = []
    made: Trace = []
    for _ in range(turns):
        if not talking or random.random() < 0.2:
            talking.append([*random.choice(systems)])
        said = random.choice(talking[-40:])
        said += new(random.randrange(1, 8))
        made.append(list(said))
        if random.random() < 0.15:
            talking.remove(said)
    return made


def pauses(turns: int) -> Trace:
    random, new = Random(1), fresh()
    made: list[tuple[float, list[int]]] = []
    for number in range(turns // 8):
        when, said = float(number), new(3)
        while True:
            said = said + new(random.randrange(1, 7))
            made.append((when, said))
            when += random.lognormvariate(4, 1.6)
            if random.random() < 1 / 8:
                break
    return by_time(made)


def system_prompts(turns: int) -> Trace:
    random, new = Random(2), fresh()
    systems = [new(random.randrange(2, 20)) for _ in range(400)]
    return [systems[by_popularity(random, 400)] + new(random.randrange(1, 6)) for _ in range(turns)]


def agents(turns: int) -> Trace:
    random, new = Random(3), fresh()
    tools = [new(random.randrange(8, 25)) for _ in range(12)]
    made: list[tuple[float, list[int]]] = []
    for number in range(turns // 24):
        task = tools[by_popularity(random, 12)] + new(3)
        for _ in range(random.choice((1, 1, 2, 3))):
            when, said = 20 * number + 5 * random.random(), task
            for _ in range(random.randrange(3, 25)):
                said = said + new(random.randrange(1, 4))
                made.append((when, said))
                when += random.lognormvariate(1, 1)
    return by_time(made)


def documents(turns: int) -> Trace:
    random, new = Random(4), fresh()
    texts = [new(random.randrange(5, 40)) for _ in range(600)]
    made: list[tuple[float, list[int]]] = []
    for number in range(turns // 3):
        text = texts[(by_popularity(random, 600) + number // 300 * 37) % 600]
        made += [(number + 20.0 * later, text + new(1)) for later in range(random.randrange(1, 6))]
    return by_time(made)


def one_off(turns: int) -> Trace:
    random = Random(5)
    made: Trace = []
    scanned = count(10**9)
    for keys in conversations(turns // 2):
        made += [keys, *([[next(scanned) for _ in range(random.randrange(10, 60))]] * (random.random() < 0.5))]
    return made


def rounds(turns: int) -> Trace:
    random, new = Random(6), fresh()
    prompts = [new(random.randrange(4, 16)) for _ in range(max(1, turns // 40))]
    return [prompts[turn % len(prompts)] + new(1) for turn in range(turns)]


MADE: dict[str, Callable[[int], Trace]] = {
    "conversations": conversations,
    "pauses": pauses,
    "system prompts": system_prompts,
    "agents": agents,
    "documents": documents,
    "one-off": one_off,
    "rounds": rounds,
}
BENCHMARKS = {"prefix": Benchmark(turns_of_talks, or_link(talking)), "hit-rate": Benchmark(hit_rates)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
