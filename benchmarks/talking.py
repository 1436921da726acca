"""The processes of bench_prefix.py that talk: each holds one model and what was said so far."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch
from budgets import page_size
from common import Options
from generating import Clock
from llama import build, shape
from peer import synchronize
from transformers import DynamicCache

import ballonet
from ballonet.allocator.errors import BudgetInUse

MANAGED = ("device", "host")


class Talk:
    """One history, and turns that go on from it, each with a question of its own."""

    def __init__(self, peer: str, chosen: Options, tokens: int) -> None:
        """`tokens`: of an answer."""
        self._peer = peer
        self._chosen = chosen
        self._tokens = tokens
        self._budget = (64 if chosen.cuda else 6) * 2**30
        if peer in MANAGED:
            ballonet.install(self._budget, page_size=page_size(chosen))
        self._model = build(shape(chosen), chosen.device)
        self._managed = ballonet.manage(self._model, prefix_cache=True) if peer in MANAGED else None
        self._cache: DynamicCache | None = None
        self._history = torch.empty(1, 0, dtype=torch.int64)
        self._question = 0

    def begin(self, history: int, question: int) -> None:
        """So many tokens were said, and computed; so many are asked at each turn."""
        self._history, self._question = self._text(history, seed=history), question
        self._cache = None
        if self._managed is not None:
            assert self._managed.prefixes is not None
            self._managed.prefixes.clear()
        if self._peer in ("by hand", "offloaded"):
            self._cache = DynamicCache(config=self._model.config, offloading=self._peer == "offloaded")
        if self._peer != "recompute":
            self._say(self._history, 1)

    def turn(self, number: int) -> dict[str, Any]:
        """ms to the first token; the tokens; those of the prompt that were not computed; bytes on the host before."""
        prompt = torch.cat([self._history, self._text(self._question, seed=1000 + number)], 1)
        if self._cache is not None:
            self._cache.crop(self._history.shape[1] - self._cache.get_seq_length())
        if self._peer == "host":
            self._to_the_host()
        before, away = self._reused(), self._away()
        ms, tokens = self._say(prompt, self._tokens)
        return {"ms": ms, "tokens": tokens, "reused": self._reused() - before, "away": away}

    def _say(self, prompt: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
        device = self._chosen.device
        ids = prompt.to(device)
        clock = Clock(lambda: synchronize(device), int)
        synchronize(device)
        begin = time.perf_counter()
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[clock],
            **({"past_key_values": self._cache} if self._cache is not None else {}),
        )
        return (clock.times[0] - begin) * 1e3, found[0, prompt.shape[1] :].tolist()

    def _text(self, tokens: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, self._model.config.vocab_size, (1, tokens), generator=generator)

    def _to_the_host(self) -> None:
        """As others who need its pages would do it: the budget is small for a moment."""
        assert self._managed is not None
        try:
            while (found := ballonet.stats()).pages["kv"]:  # what is idle among activations goes first
                ballonet.set_budget((sum(found.pages.values()) - found.pages["kv"]) * found.page_size)
        except BudgetInUse as error:
            with suppress(BudgetInUse):
                ballonet.set_budget(error.smallest)
        ballonet.set_budget(self._budget)

    def _reused(self) -> int:
        if self._managed is None or self._managed.prefixes is None:
            return 0
        return self._managed.prefixes.counts.hits

    def _away(self) -> int:
        found = ballonet.stats() if self._managed is not None else None
        return found.host_pages * found.page_size if found is not None else 0
