"""KV of requests that run while replicas drop layers and get them back: sources and targets of its pieces, damaged and
lost ones, what is kept of requests meanwhile; their tokens stay, and their KV is counted.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.replicas import kv_exchange as handover
from ballonet.hooks.replicas.kv_exchange import Handed, HandedOver, Handover, Piece, Regrouping, moves
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.replica_model import ReplicaModel, SpanCache
from ballonet.hooks.sampling.grammar import Grammars
from ballonet.hooks.sampling.settings import Sampling
from ballonet.offload.policy.replicas.groups import Group, Span, alone

from ..models import build
from ..pool import bytes_that_exist
from ..serving.batches import prompts
from .stages import CHUNK, InProcess, MemoryLink, Regroup, Replicas, Told, answered, evenly, install, requests
from .test_pipeline import four_layers, said

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@given(layers=st.integers(4, 40), old=st.integers(1, 4), new=st.integers(1, 4), shift=st.integers(0, 4))
def test_every_layer_comes_to_who_gets_it_from_one_that_has_it(layers: int, old: int, new: int, shift: int) -> None:
    had = {f"r{n}": span for n, span in enumerate(evenly(layers, old))}
    gets = {f"r{n + shift}": span for n, span in enumerate(evenly(layers, new))}
    moved = moves(had, gets)
    came: dict[str, list[int]] = {name: [] for name in gets}
    for source, target, run in moved:
        assert run
        assert set(run) <= set(had[source])
        came[target] += run
        for layer in run:
            if target in had and layer in had[target]:
                assert source == target, "what is there is not sent"
    assert {name: sorted(moved) for name, moved in came.items()} == {name: list(span) for name, span in gets.items()}


def test_a_merged_group_sends_each_layer_once() -> None:
    half = {"a": range(4), "b": range(4, 8)}
    assert moves({"a": range(8)}, half) == [("a", "a", range(4)), ("a", "b", range(4, 8))]
    assert moves(half, {"a": range(8)}) == [("a", "a", range(4)), ("b", "a", range(4, 8))]
    quarters = {"a": range(2), "c": range(2, 4), "b": range(4, 6), "d": range(6, 8)}
    assert [move for move in moves(half, quarters) if move[0] != move[1]] == [
        ("a", "c", range(2, 4)),
        ("b", "d", range(6, 8)),
    ]


def test_a_checksum_sees_one_bit_and_words_that_change_places() -> None:
    tensor = torch.randn(3, 2, 4, 2, 8, generator=torch.Generator().manual_seed(1))
    words = tensor.view(torch.int32).flatten()
    checksum = SpanCache.checksum
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    words[17] ^= 1
    assert checksum(tensor) != before
    words[17] ^= 1
    words[[3, 40]] = words[[40, 3]]
    assert checksum(tensor) != before
    assert checksum(tensor.to(torch.bfloat16)) != before


@functools.lru_cache
def of_one_replica(sampling: Sampling | None = None) -> tuple[list[Request], list[list[int]]]:
    """Requests, and what one replica answers."""
    model, asked = build("llama", num_hidden_layers=2), requests(prompts(5, 2 * CHUNK), 16, sampling)
    install()
    return asked, answered(model, asked, 1)


def joined(
    asked: list[Request],
    act: Callable[[InProcess, Regroup], None],
    before: Callable[[InProcess], None] | None = None,
    grammars: Grammars | None = None,
) -> Told:
    """Two groups of one become one of two, while their requests run; `act` is called for each step."""
    told = Told()
    with Replicas([build("llama", num_hidden_layers=2) for _ in range(2)], grammars) as members:
        singles = [InProcess(0, [member], [range(2)], told) for member in members]
        for number, request in enumerate(asked):
            singles[number % 2].add(request)
        for _ in range(10):
            for single in singles:
                single.step()
        group = InProcess(1, members, evenly(2, 2), told)
        if before is not None:
            before(group)
        change = Regroup(singles, [group], lambda request: 0, 1)
        assert change.left >= 4
        while change.step():
            act(group, change)
        group.run()
        assert all(not follower.held for follower in group.followers)
        assert [len(cache.pool.used) for part in (*singles, group) for cache in part.caches] == [0] * 4
        del singles, single, group, change, request
    return told


def serve(group: InProcess, change: Regroup) -> None:
    group.step()


@pytest.mark.parametrize("sampling", [None, Sampling(0, 1.0, 30, 0.9, frequency=0.4)], ids=["greedy", "sampling"])
def test_requests_of_two_replicas_go_on_in_one_group(sampling: Sampling | None) -> None:
    asked, expected = of_one_replica(sampling)
    install()
    assert joined(asked, serve).answers(asked) == expected


@pytest.mark.parametrize("wrong", [0, 7, 20])
def test_a_piece_that_changes_on_its_way_has_the_request_computed_again(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, expected = of_one_replica()
    install()
    count, checksum = iter(range(10**6)), SpanCache.checksum

    def spoiled(*args: Any) -> int:
        return checksum(*args) + (next(count) == wrong)

    monkeypatch.setattr(SpanCache, "checksum", staticmethod(spoiled))
    changes = []

    def act(group: InProcess, change: Regroup) -> None:
        changes.append(change)
        group.step()

    told = joined(asked, act)
    damaged = changes[-1].damaged
    changes.clear()
    assert told.answers(asked) == expected
    assert len(damaged) == 1, "the supervisor is told, once"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_request_that_finds_no_memory_on_its_way_is_computed_again(stage: int) -> None:
    asked, expected = of_one_replica()
    install()
    refused = []

    def lacks(group: InProcess) -> None:
        stock = group.caches[stage].store

        def store(state: Any, tokens: int) -> bool:
            if len(refused) < 2 and not group.leader.requests.by_name:
                refused.append(state.request_id)
                return False
            return stock(state, tokens)

        group.caches[stage].store = store  # type: ignore[method-assign]

    assert joined(asked, lambda group, change: None, lacks).answers(asked) == expected
    assert len(refused) > 0


@pytest.mark.parametrize("wrong", [0, 9])
def test_a_piece_that_finds_no_memory_as_it_is_taken_has_the_request_computed_again(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was damaged, so no replica is blamed."""
    asked, expected = of_one_replica()
    install()
    stock, count, changes = MemoryLink.take, iter(range(10**6)), list[Regroup]()

    def take(self: MemoryLink, tag: str) -> torch.Tensor | None:
        piece = stock(self, tag)
        if tag == "kv" and piece is not None and next(count) == wrong:
            raise torch.OutOfMemoryError("planted")
        return piece

    def act(group: InProcess, change: Regroup) -> None:
        changes[:] = [change]
        group.step()

    monkeypatch.setattr(MemoryLink, "take", take)
    told = joined(asked, act)
    damaged = changes.pop().damaged
    assert told.answers(asked) == expected
    assert next(count) > wrong
    assert damaged == []


def test_a_request_is_cancelled_on_its_way() -> None:
    asked, expected = of_one_replica()
    install()
    names = iter(["q2"])

    def act(group: InProcess, change: Regroup) -> None:
        if (name := next(names, None)) is not None:
            change.cancel(name)
        group.step()

    told = joined(asked, act)
    assert "q2" not in told.over
    others = [request for request in asked if request.name != "q2"]
    assert told.answers(others) == [answer for n, answer in enumerate(expected) if n != 2]


def test_new_requests_are_served_while_others_are_on_their_way() -> None:
    asked, expected = of_one_replica()
    install()
    more = [replace(request, name=f"n{request.name}", new=4) for request in asked]
    heard = Told()
    served = []

    def act(group: InProcess, change: Regroup) -> None:
        if not served:
            group.leader.requests._notify = lambda request, error: (heard if request.name.startswith("n") else stock)(
                request, error
            )
            for request in more:
                group.add(request)
        served.append(len(heard.over))
        group.step()

    told = Told()
    stock = told
    with Replicas([build("llama", num_hidden_layers=2) for _ in range(2)]) as members:
        single = InProcess(0, members[:1], [range(2)], told)
        for request in asked:
            single.add(request)
        for _ in range(14):
            single.step()
        group = InProcess(1, members, evenly(2, 2), told)
        change = Regroup([single], [group], lambda request: 0, 1)
        while change.step():
            act(group, change)
        assert served[-1] == len(more), "all were answered before the last one had gone over"
        group.run()
        del single, group, change
    assert told.answers(asked) == expected
    assert heard.answers(more) == [answer[:4] for answer in expected]


# What is kept of requests


class Cache:
    """A cache of one block."""

    def read_blocks(self, *_: object) -> torch.Tensor:
        return torch.zeros(4)

    def checksum(self, tensor: torch.Tensor) -> int:
        return 0


class Sent:
    """A link that counts messages."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def send(self, tensor: torch.Tensor, tag: str) -> None:
        self.tags.append(tag)

    def has(self, tag: str) -> bool:
        return False

    def take(self, tag: str) -> None:
        return None


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Cycles of references stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_handover_that_is_given_up_in_the_middle_keeps_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of lost KV is needed for layers at once, before a collection of cycles."""
    monkeypatch.setattr(handover, "pieces", lambda *_: iter([Piece("a", 4, 2, n, 1) for n in range(3)]))
    monkeypatch.setattr(
        handover, "Arrivals", lambda cache: SimpleNamespace(take=lambda *_: False, lost={}, cache=cache)
    )
    old, link = Cache(), Sent()
    pair = Group((0, 1), (Span(0, 2), Span(2, 4)))
    stage: Any = SimpleNamespace(cache=Cache(), leader=None, follower=None, group=pair)
    links: Any = {1: link}
    given: Any = old
    change = Handover(Regrouping(0, lambda _: pair, links, frozenset({0})), given, stage, lambda *_: None, 1)
    change.take_in(HandedOver(0, alone(0, 4), (Handed(Request("a", (1, 2, 3, 4), 2), 4),)))
    while "kv" not in link.tags:
        assert change.step()
    kept = [weakref.ref(cache) for cache in (old, stage.cache)]
    change.close()
    del change, old, given, stage
    assert [reference() for reference in kept] == [None, None]


# Tokens and pages


def group(members: list[ReplicaModel], stages: int, told: Told, epoch: int = 1) -> InProcess:
    layers = members[0].model.config.num_hidden_layers
    return InProcess(epoch, members[:stages], evenly(layers, stages), told)


def split(members: list[ReplicaModel], told: Told, epoch: int) -> list[InProcess]:
    """A group for each of these replicas, alone."""
    return [InProcess(epoch, [member], evenly(member.model.config.num_hidden_layers, 1), told) for member in members]


def sectors(of: InProcess) -> list[int]:
    for cache in of.caches:
        cache.pool.try_to_free_sectors()
    return [len(cache.pool.used) for cache in of.caches]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("llama", None), ("gemma2", None), ("mistral-window", None), ("llama", Sampling(0, 0.8, 20, 0.95))],
)
def test_tokens_stay_while_spans_change(name: str, sampling: Sampling | None) -> None:
    """One replica, two, four, and one again, in the middle of answers."""
    model, told = four_layers(name), Told()
    asked = requests(prompts(5, 2 * CHUNK), 24, sampling)
    greedy = said(model, [list(request.prompt) for request in asked], 24) if sampling is None else None
    install()
    expected = greedy or answered(model, asked, 1)
    with Replicas([four_layers(name) for _ in range(4)]) as members:
        current = group(members, 1, told)
        for request in asked[:3]:
            current.add(request)
        for epoch, stages in enumerate((2, 4, 1), 2):
            for _ in range(6):
                current.step()
            assert len(told.over) < len(asked)
            following = group(members, stages, told, epoch)
            apart = split(members[stages : len(current.stages)], told, epoch)
            change = Regroup([current], [following, *apart], lambda request: 0, 2)
            assert change.left > 0
            if epoch == 2:
                for request in asked[3:]:
                    following.add(request)
            while change.step():
                following.step()
            assert sectors(current) == [0] * len(current.stages)
            current = following
        current.run()
        del current, following, change, apart
        assert told.answers(asked) == expected


SMALL = 4096  # a page: one block of 16 tokens in one layer of `paged()`


def paged() -> Any:
    """A model of 4 layers whose blocks take a page for each layer."""
    return build("llama", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def pages_of(of: InProcess, request: str) -> list[int]:
    return [cache.request_pages.count(request) for cache in of.caches]


@pytest.mark.counts
def test_a_stage_has_its_part_of_the_pages() -> None:
    """Pages are counted, request by request, before and after each exchange: k stages have 1/k each."""
    ballonet.install(4096 * SMALL, page_size=SMALL, host_budget=64 * SMALL, device="cpu")
    asked, told = requests([list(range(3, 3 + n)) for n in (40, 16, 33)], 100), Told()
    with Replicas([paged() for _ in range(4)]) as members:
        current = group(members, 1, told)
        for request in asked:
            current.add(request)
        for epoch, stages in enumerate((2, 4, 2, 1), 2):
            for _ in range(12):
                current.step()
            following = group(members, stages, told, epoch)
            fixed = sum(cache.pages.pieces(1)[-1] + 1 for cache in following.caches)
            held = {}
            current.drain()
            for request in asked:
                held[request.name] = current.leader.requests.held(request.name)
                blocks = -(-held[request.name] // 16)
                k = len(current.stages)
                assert pages_of(current, request.name) == [blocks * 4 // k] * k
            apart = split(members[stages : len(current.stages)], told, epoch)
            Regroup([current], [following, *apart], lambda request: 0, 3).run()
            for request in asked:
                assert pages_of(current, request.name) == [0] * len(current.stages)
                assert pages_of(following, request.name) == [-(-held[request.name] // 16) * 4 // stages] * stages
                assert [follower.held[request.name] for follower in following.followers] == [held[request.name]] * (
                    stages - 1
                )
            current = following
            del following, apart
            gc.collect()
            devices.require().reap(wait=True)
            blocks = sum(-(-tokens // 16) for tokens in held.values())
            assert devices.require().snapshot()["pages"]["kv"] == fixed + blocks * 4
        assert not told.over
        del current


@pytest.mark.usefixtures("no_collections")
@pytest.mark.counts
def test_dropping_and_restoring_again_and_again_leaves_no_page_behind() -> None:
    """Two replicas with requests of their own become a group of two, and two again, 20 times, while they answer."""
    install()
    asked, told = requests(prompts(5, 2 * CHUNK), 150), Told()
    expected = answered(build("llama"), asked, 1)
    with Replicas([build("llama") for _ in range(2)]) as members:

        def home(request: Request) -> int:
            return int(request.name[1:]) % 2

        def existing() -> int:
            devices.require().reap(wait=True)
            devices.require().trim()
            return bytes_that_exist()

        before = existing()
        single = split(members, told, 1)
        for request in asked:
            single[home(request)].add(request)
        for cycle in range(20):
            for replica in single:
                replica.step()
            joined = group(members, 2, told, 2 * cycle + 2)
            Regroup(single, [joined], lambda request: 0, 4).run()
            single = []
            for _ in range(3):
                joined.step()
            single = split(members, told, 2 * cycle + 3)
            change = Regroup([joined], single, home, 64)
            assert change.left >= 3
            while sum(change.step() for _ in range(4)):
                for replica in single:
                    replica.step()
            del change, joined
        assert not told.over
        for replica in single:
            replica.run()
        assert told.answers(asked) == expected
        assert [len(cache.pool.used) for replica in single for cache in replica.caches] == [0, 0]
        del single, replica
        assert existing() == before  # a group's memory has gone with it, at once
