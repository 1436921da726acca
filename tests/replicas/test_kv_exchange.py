"""Pieces of KV between replicas: sources and targets, and requests whose pieces are damaged or lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ballonet.hooks.replicas.kv_exchange import moves
from ballonet.hooks.replicas.microbatch_plan import Request, Sampling
from ballonet.hooks.replicas.replica_model import SpanCache

from ..models import build
from ..serving.batches import prompts
from .grouped import CHUNK, Replicas, Told, answered, evenly, install, requests
from .in_process import InProcess, MemoryLink, Regroup

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@given(layers=st.integers(4, 40), old=st.integers(1, 4), new=st.integers(1, 4), shift=st.integers(0, 4))
def test_every_layer_comes_to_who_gets_it_from_one_that_has_it(layers: int, old: int, new: int, shift: int) -> None:
    had = {f"r{n}": span for n, span in enumerate(evenly(layers, old))}
    gets = {f"r{n + shift}": span for n, span in enumerate(evenly(layers, new))}
    found = moves(had, gets)
    came: dict[str, list[int]] = {name: [] for name in gets}
    for source, target, run in found:
        assert run
        assert set(run) <= set(had[source])
        came[target] += run
        for layer in run:
            if target in had and layer in had[target]:
                assert source == target, "what is there is not sent"
    assert {name: sorted(each) for name, each in came.items()} == {name: list(span) for name, span in gets.items()}


def test_a_merged_group_sends_each_layer_once() -> None:
    half = {"a": range(4), "b": range(4, 8)}
    assert moves({"a": range(8)}, half) == [("a", "a", range(4)), ("a", "b", range(4, 8))]
    assert moves(half, {"a": range(8)}) == [("a", "a", range(4)), ("b", "a", range(4, 8))]
    quarters = {"a": range(2), "c": range(2, 4), "b": range(4, 6), "d": range(6, 8)}
    assert [each for each in moves(half, quarters) if each[0] != each[1]] == [
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
def alone(sampling: Sampling | None = None) -> tuple[list[Request], list[list[int]]]:
    """Requests, and what one replica answers."""
    model, asked = build("llama", num_hidden_layers=2), requests(prompts(5, 2 * CHUNK), 16, sampling)
    install()
    return asked, answered(model, asked, 1)


def joined(
    asked: list[Request], act: Callable[[InProcess, Regroup], None], before: Callable[[InProcess], None] | None = None
) -> Told:
    """Two groups of one become one of two, while their requests run; `act` is called for each step."""
    told = Told()
    with Replicas([build("llama", num_hidden_layers=2) for _ in range(2)]) as members:
        singles = [InProcess(0, [member], [range(2)], told) for member in members]
        for number, each in enumerate(asked):
            singles[number % 2].add(each)
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
        assert [len(cache.pool.used) for each in (*singles, group) for cache in each.caches] == [0] * 4
        del singles, single, group, change, each
    return told


def serve(group: InProcess, change: Regroup) -> None:
    group.step()


@pytest.mark.parametrize("sampling", [None, Sampling(0, 1.0, 30, 0.9)], ids=["greedy", "sampling"])
def test_requests_of_two_replicas_go_on_in_one_group(sampling: Sampling | None) -> None:
    asked, expected = alone(sampling)
    install()
    assert joined(asked, serve).answers(asked) == expected


@pytest.mark.parametrize("wrong", [0, 7, 20])
def test_a_piece_that_changes_on_its_way_has_the_request_computed_again(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, expected = alone()
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
    asked, expected = alone()
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
    asked, expected = alone()
    install()
    stock, count, changes = MemoryLink.take, iter(range(10**6)), list[Regroup]()

    def take(self: MemoryLink, tag: str) -> torch.Tensor | None:
        found = stock(self, tag)
        if tag == "kv" and found is not None and next(count) == wrong:
            raise torch.OutOfMemoryError("planted")
        return found

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
    asked, expected = alone()
    install()
    names = iter(["q2"])

    def act(group: InProcess, change: Regroup) -> None:
        if (name := next(names, None)) is not None:
            change.cancel(name)
        group.step()

    told = joined(asked, act)
    assert "q2" not in told.over
    others = [each for each in asked if each.name != "q2"]
    assert told.answers(others) == [each for n, each in enumerate(expected) if n != 2]


def test_new_requests_are_served_while_others_are_on_their_way() -> None:
    asked, expected = alone()
    install()
    more = [replace(each, name=f"n{each.name}", new=4) for each in asked]
    heard = Told()
    served = []

    def act(group: InProcess, change: Regroup) -> None:
        if not served:
            group.leader.requests._notify = lambda request, error: (heard if request.name.startswith("n") else stock)(
                request, error
            )
            for each in more:
                group.add(each)
        served.append(len(heard.over))
        group.step()

    told = Told()
    stock = told
    with Replicas([build("llama", num_hidden_layers=2) for _ in range(2)]) as members:
        single = InProcess(0, members[:1], [range(2)], told)
        for each in asked:
            single.add(each)
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
    assert heard.answers(more) == [each[:4] for each in expected]
