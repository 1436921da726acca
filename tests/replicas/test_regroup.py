"""Requests that run while replicas drop layers and get them back: their tokens stay, and their KV is counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.replicas.microbatch_plan import Request, Sampling
from ballonet.hooks.replicas.replica_model import ReplicaModel

from ..models import build
from ..pool import bytes_that_exist
from ..serving.batches import prompts
from .grouped import CHUNK, Replicas, Told, answered, evenly, install, requests
from .in_process import InProcess, Regroup
from .test_pipeline import four_layers, said

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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
    greedy = said(model, [list(each.prompt) for each in asked], 24) if sampling is None else None
    install()
    expected = greedy or answered(model, asked, 1)
    with Replicas([four_layers(name) for _ in range(4)]) as members:
        current = group(members, 1, told)
        for each in asked[:3]:
            current.add(each)
        for epoch, stages in enumerate((2, 4, 1), 2):
            for _ in range(6):
                current.step()
            assert len(told.over) < len(asked)
            following = group(members, stages, told, epoch)
            apart = split(members[stages : len(current.stages)], told, epoch)
            change = Regroup([current], [following, *apart], lambda request: 0, 2)
            assert change.left > 0
            if epoch == 2:
                for each in asked[3:]:
                    following.add(each)
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
        for each in asked:
            current.add(each)
        for epoch, stages in enumerate((2, 4, 2, 1), 2):
            for _ in range(12):
                current.step()
            following = group(members, stages, told, epoch)
            fixed = sum(cache.pages.pieces(1)[-1] + 1 for cache in following.caches)
            held = {}
            current.drain()
            for each in asked:
                held[each.name] = current.leader.requests.held(each.name)
                blocks = -(-held[each.name] // 16)
                k = len(current.stages)
                assert pages_of(current, each.name) == [blocks * 4 // k] * k
            apart = split(members[stages : len(current.stages)], told, epoch)
            Regroup([current], [following, *apart], lambda request: 0, 3).run()
            for each in asked:
                assert pages_of(current, each.name) == [0] * len(current.stages)
                assert pages_of(following, each.name) == [-(-held[each.name] // 16) * 4 // stages] * stages
                assert [follower.held[each.name] for follower in following.followers] == [held[each.name]] * (
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


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Cycles of references stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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
        for each in asked:
            single[home(each)].add(each)
        for cycle in range(20):
            for each in single:
                each.step()
            joined = group(members, 2, told, 2 * cycle + 2)
            Regroup(single, [joined], lambda request: 0, 4).run()
            single = []
            for _ in range(3):
                joined.step()
            single = split(members, told, 2 * cycle + 3)
            change = Regroup([joined], single, home, 64)
            assert change.left >= 3
            while sum(change.step() for _ in range(4)):
                for each in single:
                    each.step()
            del change, joined
        assert not told.over
        for each in single:
            each.run()
        assert told.answers(asked) == expected
        assert [len(cache.pool.used) for each in single for cache in each.caches] == [0, 0]
        del single, each
        assert existing() == before  # a group's memory has gone with it, at once
