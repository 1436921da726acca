"""Chaos mode: pages move under a running model, and no one can tell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import ballonet
from ballonet import testing
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.testing import chaos_of
from ballonet.testing.chaos import MOVES, OF_A_PEER, PAGES, WHERE, Chaos
from ballonet.testing.sources import ReclaimSource

from . import models
from .core import Other
from .pool import installing
from .tuned import Tuned

PAGE = 16 * 2**10
STORIES = Path(__file__).parents[2] / "shared" / "data" / "models" / "stories260K_hf"


class Pieces:
    """Pages as `Chaos` sees them: where each piece lies, and what was asked for."""

    def __init__(self, backing: list[str], moves: bool = True) -> None:
        self.places = list(backing)
        self.moves = moves
        self.asked: list[tuple[int, str]] = []

    @property
    def pieces(self) -> int:
        return len(self.places)

    def leads_to(self, piece: int) -> str:
        return self.places[piece]

    def move(self, piece: int, to: Literal["device", "host", "peer"]) -> bool:
        assert self.places[piece] in ("device", "host", "peer")
        return self._go(piece, to, to)

    def displace(self, piece: int) -> bool:
        assert self.places[piece] == "device"
        return self._go(piece, "away", "alias")

    def demote(self, piece: int) -> bool:
        assert self.places[piece] == "alias"
        return self._go(piece, "down", "alias")

    def bring_back(self, piece: int) -> bool:
        assert self.places[piece] == "alias"
        return self._go(piece, "restored", "device")

    def unmap(self, piece: int) -> bool:
        assert self.places[piece] == "kept"
        return self._go(piece, "unmapped", "kept")  # somebody leaves it again

    def _go(self, piece: int, way: str, to: str) -> bool:
        self.asked.append((piece, way))
        if self.moves:
            self.places[piece] = to
        return self.moves


BACKINGS = st.lists(st.sampled_from(["none", "device", "host", "peer", "pending_free", "alias", "kept"]), max_size=5)


@given(st.integers(0, 99), st.lists(BACKINGS, max_size=3), st.lists(BACKINGS, max_size=3), st.booleans(), st.booleans())
def test_weights_stay_on_the_device_and_only_what_moved_is_counted(
    seed: int, weights: list[list[str]], caches: list[list[str]], host: bool, moves: bool
) -> None:
    heavy, light = [Pieces(weight, moves) for weight in weights], [Pieces(cache, moves) for cache in caches]
    chaos = Chaos(seed, host, peer=host)
    for _ in range(5):
        chaos.act(heavy, light)
    asked = {
        "weights": [to for pieces in heavy for _, to in pieces.asked],
        "kv": [to for pieces in light for _, to in pieces.asked],
    }
    assert set(asked["weights"]) <= {"device"}
    assert set(asked["kv"]) <= (set(WHERE) if host else {"device", "unmapped"})
    some = any(place in ("device", "host", "peer") for pieces in heavy for place in pieces.places)
    assert len(asked["weights"]) == (5 * MOVES if some else 0)
    some = any(
        place in ("device", "host", "peer", "kept") or (host and place == "alias")
        for pieces in light
        for place in pieces.places
    )
    assert len(asked["kv"]) == (5 * MOVES if some else 0)
    ways = Counter(asked["kv"])
    shown = [way for way in WHERE if host or way not in OF_A_PEER]
    expected = {"weights": len(asked["weights"]), **{f"kv_{way}": ways[way] for way in shown}}
    assert dict(chaos.moved) == (expected if moves else dict.fromkeys(expected, 0))


def test_same_seed_moves_the_same_and_draws_from_no_one_elses_generator() -> None:
    def asked(seed: int) -> list[list[tuple[int, str]]]:
        ranges = [Pieces(["device"] * 9 + ["kept"]) for _ in range(4)]
        chaos = Chaos(seed, host=True, peer=True)
        for _ in range(20):
            chaos.act(ranges[:2], ranges[2:])
        return [pieces.asked for pieces in ranges]

    states = random.getstate(), torch.get_rng_state()
    first = asked(3)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert asked(3) == first
    assert asked(4) != first
    assert {way for pieces in first[2:] for _, way in pieces} == set(WHERE)


class Layers(ReclaimSource):
    """The source of eight layers of so many pages: a reclaim takes whole ones, and whole ones alone go back."""

    source = PageSource.HIDDEN_WEIGHTS

    def __init__(self, pages: int) -> None:
        self.here = 8
        self.seen = set[int]()
        self._pages = pages

    def would_free(self) -> int:
        return self.here * self._pages

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def reclaim(self, pages: int) -> int:
        return self._become(max(0, self.here + -pages // self._pages))

    def restore(self, pages: int) -> int:
        return -self._become(min(8, self.here + pages // self._pages))

    def _become(self, here: int) -> int:
        freed, self.here = (self.here - here) * self._pages, here
        self.seen.add(here)
        return freed


def test_layers_larger_than_what_a_source_is_asked_for_leave_and_come_back() -> None:
    """No layer stays away for good, whatever was reclaimed before."""
    chaos, layers = Chaos(1, host=True), Layers(PAGES + 1)
    for _ in range(400):
        chaos.reclaim([layers])
    assert layers.seen >= {8, 7, 6}
    moved = chaos.reclaimed
    gone, back = moved["hidden weights", "reclaim"], moved["hidden weights", "restore"]
    assert gone - back == (8 - layers.here) * (PAGES + 1)
    assert back > 8 * (PAGES + 1), "more than all of them once"


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLONET_PEER_BUDGET", "2MiB")


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(2**26, PAGE) as install:
        yield install()


def moved(managed: ballonet.Managed) -> dict[str, int]:
    assert chaos_of(managed) is not None
    return dict(chaos_of(managed).moved)


@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize(("seed", "mode"), [*enumerate(models.MODES, 1)])
def test_logits_are_the_same_to_the_bit(device: Device, mode: str, seed: int) -> None:
    model = models.build("llama")
    inputs = models.prompts(3, 17)
    stock = models.generate(model, mode, inputs)
    with ballonet.manage(model):
        calm = models.generate(model, mode, inputs)
    assert torch.equal(calm.tokens, stock.tokens)
    pages = {}
    with testing.manage(model, chaos=seed) as managed:
        before = _pages(managed)
        wild = models.generate(model, mode, inputs)
        pages = moved(managed)
        assert _pages(managed) != before
    assert torch.equal(wild.tokens, calm.tokens)
    assert torch.equal(wild.logits, calm.logits)
    few = {"kv_down", "kv_unmapped"}  # as few pages are full here, and none is given up before the end
    assert min(count for way, count in pages.items() if way not in few) > 2, pages
    copied = ballonet.stats().copied
    assert (copied.weights_d2h, copied.weights_h2d) == (0, 0)
    assert min(copied.kv_d2h, copied.kv_d2p, copied.kv_p2d, copied.kv_p2h) >= PAGE
    assert copied.kv_h2d >= PAGE


def _pages(managed: ballonet.Managed) -> list[int]:
    ranges = managed._weights.all_ranges()
    return [range_.page(piece) for range_ in ranges for piece in range(range_.pieces)]


@pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is not there")
def test_a_trained_model_for_thousands_of_tokens(device: Device, tuned: Tuned) -> None:
    """Whose answers go on from what it said before, so that a wrong byte of its cache shows till the end."""
    tuned(weights={"large": 2**10})  # so that its layers have ranges
    ids = torch.randint(3, 500, (16, 12), generator=torch.Generator().manual_seed(3))
    length = {"max_new_tokens": 160, "min_new_tokens": 160, "pad_token_id": 0}

    def say(model: Any) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        return tokens

    with install.stock():
        model = AutoModelForCausalLM.from_pretrained(STORIES)
        expected = say(model)
    intervals: tuple[int | Literal["auto"], ...] = ("auto", 2)
    for seed, interval in enumerate(intervals):
        with testing.manage(model, chaos=seed, interval=interval) as managed:
            assert torch.equal(say(model), expected), interval
            assert min(count for way, count in moved(managed).items() if way != "kv_unmapped") > 10
            device.check()


def test_pages_move_to_others_and_keep_their_addresses(device: Device) -> None:
    model = models.build("llama", hidden_size=64)
    with testing.manage(model, chaos=1) as managed:
        addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        models.generate(model, "greedy", models.prompts(1, 9), tokens=30)
        assert moved(managed)["weights"] > 4 * managed.report().pages
        for name, tensor in model.state_dict().items():
            assert tensor.data_ptr() == addresses[name]
            assert torch.equal(tensor, values[name])


def test_weights_that_a_graph_of_another_thread_holds_stay_where_they_are(device: Device, other: Other) -> None:
    """The graph's backward may be running: it has no lease."""
    model = models.build("llama")
    ids = models.prompts(1, 9)["input_ids"]
    with testing.manage(model, chaos=5) as managed:
        models.generate(model, "greedy", models.prompts(1, 9))
        held = [other.does(lambda: model(ids).logits.sum())]
        before = moved(managed)
        models.generate(model, "greedy", models.prompts(1, 9))
        assert moved(managed)["weights"] == before["weights"] > 0
        assert moved(managed)["kv_device"] > before["kv_device"]
        held.pop().backward()
        models.generate(model, "greedy", models.prompts(1, 9))
        assert moved(managed)["weights"] > before["weights"]


def test_a_full_pool_stops_the_moves_and_nothing_else(device: Device) -> None:
    model = models.build("llama")
    inputs = models.prompts(1, 9)
    expected = models.generate(model, "greedy", inputs)
    with testing.manage(model, chaos=1) as managed:
        models.generate(model, "greedy", inputs)
        device.trim()
        ballonet.set_budget(sum(ballonet.stats().pages.values()) * PAGE)
        before = moved(managed)["weights"]
        with torch.no_grad():
            model(**inputs, use_cache=False)
        assert moved(managed)["weights"] == before
        ballonet.set_budget(2**26)
        assert models.generate(model, "greedy", inputs).agrees(expected)
        assert moved(managed)["weights"] > before
