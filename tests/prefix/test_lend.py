"""Models that lend each other pages: tokens stay, keys go before pages, what is in use stays, and who comes back finds
what is its own (SwiftCache §3.4, §3.5)."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, Final, NamedTuple

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.allocator.errors import BallonetError
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import GroupLease
from ballonet.hooks.kv.pages import KVPages
from ballonet.hooks.prefix.store import PrefixStore
from ballonet.offload.manager.reclaim import Repayment
from ballonet.offload.policy.lending import PART, Lent, unit_within

from ..models import build
from ..pool import bytes_that_exist, tiny_layers
from ..tuned import Clock, Tuned
from .conversations import BLOCK, check_index, words

PAGE: Final = 4096
# In float64, where no rounding decides a token. A page holds 4 tokens of one of 6 layers, and 8 of one of 4: most of
# what a request takes is KV.
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 6},
    "qwen2": {"num_key_value_heads": 4, "num_hidden_layers": 4},
}


@cache
def stock(name: str) -> Any:
    return build(name, **MODELS[name]).double()


class Turn(NamedTuple):
    """A prompt, and the tokens that stock makes of it. Made before anything is installed: stock takes no pages."""

    prompt: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, name: str, prompt: torch.Tensor, new: int = 3) -> Turn:
        return cls(prompt, stock(name).generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False))


@cache
def turns(name: str, seed: int, *lengths: int) -> list[Turn]:
    """Unlike each other, of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [Turn.of(name, words(generator, length)) for length in lengths]


def talk(name: str, seed: int, count: int) -> list[Turn]:
    """Conversations go on from each other at random."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    said: list[Turn] = []
    for _ in range(count):
        before = draw.choice([words(generator, 20), words(generator, 60), *(turn.tokens for turn in said)])
        prompt = torch.cat([before[:, : draw.randint(8, before.shape[1])], words(generator, draw.randint(9, 150))], 1)
        said.append(Turn.of(name, prompt[:, :200], draw.randint(1, 4)))
    return said


class One:
    """A managed model that keeps prefixes."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model = build(name, **MODELS[name]).double()
        self.managed = testing.manage(self.model, prefix_cache=True, **options)
        self.store.contents.index.blocks.block = BLOCK

    @property
    def store(self) -> PrefixStore:
        assert self.managed.prefixes is not None
        return self.managed.prefixes

    @property
    def lent(self) -> Lent:
        return self.managed.report().lending

    def ask(self, turn: Turn, **options: Any) -> None:
        """The tokens are those of stock."""
        new = turn.tokens.shape[1] - turn.prompt.shape[1]
        tokens = self.model.generate(turn.prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
        assert torch.equal(tokens, turn.tokens), "other tokens than stock's"


@contextmanager
def models(
    monkeypatch: pytest.MonkeyPatch, tuned: Tuned, pages: int, host: int, window: float, *names: str, **options: Any
) -> Iterator[list[One]]:
    """Managed on a device with so many pages, and so many on the host, where a reserve outlasts its use by so many
    seconds."""
    monkeypatch.setenv("BALLONET_HOST_BUDGET", str(host * PAGE))
    monkeypatch.setenv("BALLONET_RESERVE", f"{window} s")
    with tiny_layers(tuned, pages * PAGE, PAGE), ExitStack() as stack:
        ones = []
        for name in names:
            ones.append(One(name, **options))
            stack.callback(ones[-1].managed.release)
        yield ones
        devices.require().check()
        assert bytes_that_exist() <= pages * PAGE
        del ones


def reclaimed() -> int:
    """Pages that were taken back so far."""
    lent = ballonet.stats().events.get("lend", {})
    return lent["reclaim"].pages if "reclaim" in lent else 0


def copied() -> int:
    """Bytes, in any direction."""
    return sum(ballonet.stats().copied.values())


class Counted:
    """The device as the manager has it, and how often it was told to take something."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def take(self, keys: list[int]) -> int:
        self.calls += 1
        return self.device.take(keys)


def test_a_worker_that_comes_back_takes_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """The worker's reserve was lent. What it lacks comes in one exchange and one call, and no byte moves; what the host
    has is not forgotten."""
    first, back = turns("llama", 1, 40, 200)
    others = turns("qwen2", 2, *[200] * 9)
    exchanges: list[tuple[int, int, int]] = []  # bytes copied, calls, pages
    take_back = Repayment._take_back
    with models(monkeypatch, tuned, 900, 2000, 0.0, "llama", "qwen2") as (worker, master):
        manager = managers.of(devices.require())
        counted = Counted(devices.require())

        def watch(self: Repayment, owed: Any, by: str) -> None:
            before = copied(), counted.calls, reclaimed()
            take_back(self, owed, by)
            exchanges.append((copied() - before[0], counted.calls - before[1], reclaimed() - before[2]))

        worker.ask(first)
        worker.store.clear()
        for turn in others:
            master.ask(turn)
        assert worker.lent.reserve < worker.lent.unit == unit_within(6, 4, 900 // PART).size == 12
        assert worker.lent.lent >= 48
        assert master.lent.borrowed > 200
        keys = len(master.store.contents.index.blocks.index)
        with monkeypatch.context() as patched:
            patched.setattr(manager._known, "device", counted)
            patched.setattr(Repayment, "_take_back", watch)
            worker.ask(back)
        assert [(moved, calls) for moved, calls, _ in exchanges] == [(0, 1)] * len(exchanges)
        assert sum(pages for *_, pages in exchanges) > 100
        assert len(master.store.contents.index.blocks.index) == keys
        check_index(master.store)
        check_index(worker.store)
        for turn in others[-3:]:  # what is a hit yet is right, and what is none is computed
            master.ask(turn)
        check_index(master.store)


def test_prefixes_the_host_has_not_are_forgotten_first(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """One model keeps prefixes that the host has no room for; the cache of another wants 36 pages, and none is free.
    Keys go from the tail, then pages, those of a sequence at once: as many calls for few as for many. No byte is moved,
    and what somebody reads stays until he is done."""
    wanted, calls, retire = 36, [0], KVPages.retire
    (first,), others = turns("llama", 1, 40), turns("qwen2", 2, *[120] * 4)
    prompts = [[*turn.tokens[0].tolist(), 1] for turn in others]

    def count(self: KVPages, first: int, end: int) -> None:
        calls[0] += 1
        retire(self, first, end)

    with models(monkeypatch, tuned, 900, 1, 0.0, "llama", "qwen2") as (worker, master):
        device, cache, store = devices.require(), ballonet.KVCache(worker.model.config), master.store
        worker.ask(first, past_key_values=cache)
        for turn in others:
            master.ask(turn)
        (tier,) = {id(layer.ranges): layer.ranges.tier for layer in cache.layers}.values()
        device.trim()
        hog = device.reserve(900 * PAGE, "weights", device.group())
        hog.map(0, device.available)
        before, counts = copied(), [store.get_num_new_matched_tokens(ids) for ids in prompts]
        with monkeypatch.context() as patched:
            patched.setattr(KVPages, "retire", count)
            read = next(n for n, tokens in enumerate(counts) if tokens >= 96)  # the one that would go first
            with store.read(prompts[read], store.identity(), 0, 96) as parts, GroupLease(tier.client._group):
                assert parts is not None
                tier.iteration(0, 1, wanted // tier.client.grows_by)
        assert wanted <= reclaimed() < wanted + 4 * 12, "and little more: blocks of a sequence, and units"
        assert calls[0] <= 2 * 4 * 4, "whatever the number of pages"
        assert copied() == before
        device.reap(wait=True)
        assert device.available >= wanted
        now = [store.get_num_new_matched_tokens(ids) for ids in prompts]
        assert now[read] == counts[read]
        assert all(after <= before for after, before in zip(now, counts, strict=True))
        assert sum(now) < sum(counts)
        check_index(store)
        hog.close()
        for turn in others:
            master.ask(turn)
        cache.reset()
        del cache, tier, hog


def test_a_reserve_is_there_for_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """Who is away for a while finds its pages free: nobody keeps anything there, as the kernel counts it."""
    first, back = turns("llama", 3, 200, 200)
    others = turns("qwen2", 2, *[200] * 9)
    with models(monkeypatch, tuned, 1000, 2000, 1e9, "llama", "qwen2") as (worker, master):
        worker.ask(first)
        worker.store.clear()
        reserve = worker.lent.reserve
        assert reserve >= 300
        assert worker.lent.lent == 0
        for turn in others:
            master.ask(turn)
            gc.collect()
            devices.require().trim()
            assert bytes_that_exist() <= (1000 - reserve) * PAGE
        assert master.lent.borrowed > 100
        check_index(master.store)
        worker.ask(back)


def test_random_lending_while_all_generate(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """Two models talk on threads of their own, others come and go, pages move at random: nothing is ever another's, and
    a request gets its tokens, or where all is in use is told so."""
    tuned(clock=Clock(step=1e-2))  # reserves that are not used are others' after a while
    talks = {name: talk(name, n, 6) for n, name in enumerate(MODELS)}
    guests = turns("qwen2", 0, 80, 60)
    failed = threading.Event()

    def say(one: One, said: Sequence[Turn]) -> int:
        answered = 0
        try:
            for turn in said:
                if not failed.is_set():
                    with suppress(torch.OutOfMemoryError):
                        one.ask(turn)
                        answered += 1
        except BaseException:
            failed.set()
            raise
        return answered

    with models(monkeypatch, tuned, 900, 500, 0.0, *MODELS, chaos=0) as both:
        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(say, one, talks[name]) for name, one in zip(talks, both, strict=True)]
            while not all(future.done() for future in running):
                try:
                    guest = One("qwen2")
                except (BallonetError, torch.OutOfMemoryError):  # it comes another time
                    wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                    continue
                say(guest, guests)
                check_index(guest.store)
                del guest  # and it is collected, as there may be no room beside the pool for what it would take out
                gc.collect()
            assert sum(future.result() for future in running) > 7
        for one in both:
            check_index(one.store)
        del one
