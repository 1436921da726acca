"""The state that a replica keeps of requests that are handed over to new groups."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ballonet.hooks.replicas import kv_exchange as handover
from ballonet.hooks.replicas.kv_exchange import Handed, HandedOver, Handover, Piece, Regrouping
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.offload.policy.replicas.groups import Group, Span, alone


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
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_who_gives_up_in_the_middle_keeps_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
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
    kept = [weakref.ref(each) for each in (old, stage.cache)]
    change.close()
    del change, old, given, stage
    assert [each() for each in kept] == [None, None]
