"""Models that lend each other pages (SwiftCache §3.4, §3.5): one fills the pool with prefixes that it keeps, the other
takes its pages back, in turns, at the same time, and while kernels read them. Tokens are those of stock with a cache
that is held by hand."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from transformers import DynamicCache

import ballonet
from ballonet.hooks.device import managers
from ballonet.hooks.prefix.store import PrefixStore
from ballonet.offload.manager.reclaim import ReclaimList
from ballonet.offload.policy.lending import Lending

from .. import models
from .scene import Lane, Place, scene
from .stock import small_layers

PAGES = 1024
LANES = 8  # pages for what is free and partly used: each stream has its own of these
TOKENS = 4  # of an answer
MOST = 16  # conversations that one model begins until the pool is full
# So many that KV takes several times what activations do, and numbers that have a unit of more than a block of either.
LAYERS: Final = {"cuda": {"llama": 12, "qwen2": 8}, "cpu": {"llama": 6, "qwen2": 4}}
Ids = list[int]


class Asked(NamedTuple):
    """A request of a conversation: what was asked, how many tokens of it were not computed, and the answer."""

    prompt: Ids
    reused: int
    answer: Ids


class Speaker:
    """A managed model that keeps prefixes, and all that it was asked, by conversation."""

    def __init__(self, place: Place, name: str) -> None:
        hidden, dim, length = (256, 256, 4096) if place.cuda else (64, 16, 4096)
        sizes = {"hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": dim}
        layers = LAYERS["cuda" if place.cuda else "cpu"][name]
        model = models.build(name, num_hidden_layers=layers, max_position_embeddings=length, **sizes)
        self.model = model.to(place.kind)
        self.managed = ballonet.manage(self.model, interval=None, prefix_cache=True)
        self.asked: dict[int, list[Asked]] = defaultdict(list)
        self.pages = 0  # of the KV of a first turn
        self._place = place
        self._random = torch.Generator().manual_seed(layers)

    @property
    def store(self) -> PrefixStore:
        assert self.managed.prefixes is not None
        return self.managed.prefixes

    @property
    def here(self) -> int:
        """Pages of the device under what it keeps."""
        return self.store.contents.index.device_pages

    def ask(self, talk: int, words: int) -> None:
        """Asks for new tokens in that conversation, on the current stream."""
        before = self.asked[talk]
        said = [*before[-1].prompt, *before[-1].answer] if before else []
        prompt = said + torch.randint(2, models.VOCABULARY, (words,), generator=self._random).tolist()
        answer = self._answer(prompt)
        self.asked[talk].append(Asked(prompt, self.store.reused, answer))

    def begin(self) -> int:
        """A new conversation, which takes several pages of each layer. Returns its number."""
        talk = len(self.asked)
        self.ask(talk, 750 if self._place.cuda else 600)
        return talk

    def compare(self) -> None:
        """Stock says the same, once the model is stock. Of each cache that is held by hand it has as many tokens as the
        managed model had, and computes the others: so kernels get the same sizes, and round the same."""
        for talk, asked in self.asked.items():
            cache = DynamicCache(config=self.model.config)
            for turn, asked_turn in enumerate(asked):
                more = cache.get_seq_length() - asked_turn.reused
                assert more >= 0
                if asked_turn.reused and more:
                    cache.crop(-more)
                elif more:
                    cache = DynamicCache(config=self.model.config)
                right = self._answer(asked_turn.prompt, past_key_values=cache)
                assert asked_turn.answer == right, (
                    f"conversation {talk}, turn {turn}: {asked_turn.answer}, by hand {right}"
                )

    def _answer(self, prompt: Ids, **more: Any) -> Ids:
        ids = torch.tensor([prompt], device=self._place.kind)
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, **more}
        tokens = self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answer: Ids = tokens[0, len(prompt) :].tolist()
        return answer


class Pair:
    """Two models in a budget in which both can answer at once, and that holds few of the prefixes that they keep. A
    reserve that is not used is lent at once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.speakers = [Speaker(place, name) for name in ("llama", "qwen2")]
        managers.of(place.device)._known.lending = Lending(0.0)
        weights = budget = self._quiet()
        for speaker in self.speakers:
            place.device.reset_peaks()
            speaker.begin()
            speaker.pages = speaker.here
            budget += place.device.snapshot()["physical_peak"] // place.page - weights
            speaker.store.clear()
            self._quiet()
        ballonet.set_budget((budget + LANES) * place.page)

    def _quiet(self) -> int:
        """Pages that are left when nothing of what came before is."""
        gc.collect()
        self._place.synchronize()
        self._place.device.reap(wait=True)
        self._place.empty_cache()
        return sum(count for owner, count in self._place.device.snapshot()["pages"].items() if owner != "free")

    def fill(self, borrower: Speaker, worker: Speaker) -> list[int]:
        """One keeps so many prefixes that what is free is less than the other, which keeps none, needs for one. Returns
        its conversations."""
        worker.store.clear()
        talks = []
        for _ in range(MOST):
            talks.append(borrower.begin())
            unused = managers.of(self._place.device).pages.unused
            if unused < worker.pages:
                lent = worker.managed.report().lending
                assert lent.lent >= lent.unit > 1
                return talks
        raise AssertionError(f"{MOST} conversations of {borrower.pages} pages, and {unused} pages are free")

    def finish(self) -> None:
        """Nothing is left behind, and all that was said was right."""
        self._place.synchronize()
        self._place.device.check()
        assert sum(ballonet.stats().pages.values()) * self._place.page <= self._place.device.budget
        for speaker in self.speakers:
            speaker.managed.release()
        gc.collect()
        ballonet.set_budget(PAGES * self._place.page)
        for speaker in self.speakers:
            speaker.compare()


def reclaimed() -> int:
    """Pages that were taken back so far."""
    lent = ballonet.stats().events.get("lend", {})
    return sum(lent[verb].pages for verb in ("reclaim", "yield") if verb in lent)


def read(borrower: Speaker, talks: Sequence[int]) -> list[torch.Tensor]:
    """Some tokens of all pages that are kept of these conversations: the current stream reads them all. When this
    returns nobody says any more that they are in use."""
    store, kept = borrower.store, []
    for asked in (borrower.asked[talk][-1] for talk in talks):
        ids = [*asked.prompt, *asked.answer]
        with store.read(ids, store.identity(), 0, len(ids) - 1) as parts:
            for layer in () if parts is None else parts.layers:
                kept += [part[:, :, ::64].clone() for part in parts(layer)]
    return kept


@scene(needs_host=True, spill=True, pages=PAGES, host_pages=PAGES)
@small_layers()  # who has none that may stream is nobody's client, and lends nothing
@torch.no_grad()
def test_models_take_their_pages_back(place: Place) -> None:
    """Each of them is once the one that comes back, while a stream reads what the other keeps: it reads what was there.
    What the other keeps yet is right, and what it lost it computes again; each time on another stream than before.
    At first keys stay, and lead to the host; then keys go, and then pages, as where the host has no bytes of them. At
    the end both begin conversations at the same time."""
    pair, lanes = Pair(place), [place.lane() for _ in range(4)]
    for forgotten, (borrower, worker) in enumerate((pair.speakers, pair.speakers[::-1])):
        talks = pair.fill(borrower, worker)
        lanes[3].follow()
        with lanes[3]():
            right = read(borrower, talks)
            assert right
            place.synchronize()
            place.sleep()
            shown = read(borrower, talks)
        before, here, evicted = reclaimed(), borrower.here, borrower.store.counts.evicted
        with lanes[0](), ExitStack() as stack:
            if forgotten:
                stack.enter_context(mock.patch.object(ReclaimList, "candidates", return_value=[]))
            back = worker.begin()
        place.device.check()
        assert reclaimed() > before
        assert borrower.here < here
        assert borrower.store.counts.evicted > evicted or not forgotten
        assert worker.here > 0
        lanes[3].lead()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(shown, right, strict=True))
        del shown, right
        for number, talk in enumerate(talks):
            with lanes[number % 3]():
                place.sleep()
                borrower.ask(talk, 40)
        with lanes[1]():
            worker.ask(back, 40)
        place.device.check()
    for speaker in pair.speakers:
        assert any(asked_turn.reused for asked in speaker.asked.values() for asked_turn in asked), (
            "all was computed again"
        )
    pair.fill(*pair.speakers)
    before = reclaimed()

    def converse(speaker: Speaker, lane: Lane) -> None:
        with lane():
            for _ in range(2):
                begun = speaker.begin()
                speaker.ask(begun, 40)
                speaker.ask(begun - 1, 40)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(converse, pair.speakers, lanes))
    assert reclaimed() > before
    pair.finish()
