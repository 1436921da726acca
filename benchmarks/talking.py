"""The processes of bench_prefix.py that talk: each holds one model and what was said so far."""

from __future__ import annotations

import time
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import torch
from budgets import page_size
from common import Options
from generating import said, words
from llama import build, shape
from peer import Functions, synchronize
from transformers import DynamicCache

import ballonet
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.compat import cache_name
from ballonet.hooks.prefix.store import PrefixStore

HELD = ("by hand", "offloaded")  # ways that hold a cache of stock's between calls


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


def functions(peer: str, chosen: Options, tokens: int) -> Functions:
    """What such a process answers, see peer.begin()."""
    talk = Talk(peer, chosen, tokens)
    return {"begin": talk.begin, "turn": talk.turn}
