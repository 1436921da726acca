"""Stages on devices of their own: what the smallest has room for is admitted, and its KV is 1/k of each token."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch

from ballonet.allocator import devices
from ballonet.allocator.config import Config
from ballonet.allocator.devices import Runtime
from ballonet.hooks.manage import managed
from ballonet.hooks.options import ManageOptions
from ballonet.hooks.replicas import leader
from ballonet.hooks.replicas.microbatch_plan import Passing
from ballonet.hooks.replicas.replica_model import GroupSettings, ReplicaModel
from ballonet.hooks.splice.splice import Splice

from ..models import build
from ..serving.batches import prompts
from ..tuned import Tuned
from .stages import BLOCK, CHUNK, InProcess, Told, evenly, requests
from .test_pipeline import said

PAGE = 16384
LARGE = 1600 * PAGE


# What requests lack first on the small device: memory for their KV, or for the masks of attention to it.
LACKING = {
    "memory": (120 * PAGE, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}),
    "masks": (60 * PAGE, {}),
}


@pytest.fixture
def two(tuned: Tuned, request: pytest.FixtureRequest) -> Iterator[tuple[Runtime, Runtime]]:
    """One device each for the first and the second stage."""
    started = tuple(
        devices.start(Config(device="cpu", budget=budget, page_size=PAGE, host_budget=PAGE, reserve=5.0), number=number)
        for number, budget in enumerate(request.param)
    )
    yield started
    gc.collect()
    for runtime in started:
        runtime.device.reap(wait=True)
        runtime.device.check()
        assert runtime.device.snapshot()["pages"]["kv"] == 0
        devices.stop(runtime.number)


@pytest.mark.parametrize(
    ("two", "lacking"),
    [((LARGE, small), name) for name, (small, _) in LACKING.items()]
    + [((small, LARGE), name) for name, (small, _) in LACKING.items()],
    indirect=["two"],
    ids=["second-memory", "second-masks", "first-memory", "first-masks"],
)
def test_no_stage_lacks_memory_for_what_is_planned(
    two: tuple[Runtime, Runtime], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = functools.partial(build, "llama", num_hidden_layers=4, **LACKING[lacking][1])
    model, told = made(), Told()
    asked = requests(prompts(20, 60), 40)
    left_out: list[tuple[str, int]] = []
    most = [0, 0]
    stock = leader.record_of

    def heard(tensor: torch.Tensor, kind: type[Passing]) -> Passing:
        answer = stock(tensor, kind)
        left_out.extend(answer.left_out)
        return answer

    monkeypatch.setattr(leader, "record_of", heard)
    spans = evenly(4, 2)
    models = [made() for _ in spans]
    holders = [managed(replica, ManageOptions(), on=on) for replica, on in zip(models, two, strict=True)]
    splices = [Splice(replica) for replica in models]
    members = [
        ReplicaModel(f"r{n}", replica, splices[n], GroupSettings.of(replica, CHUNK, page_size=BLOCK))
        for n, replica in enumerate(models)
    ]
    group = InProcess(1, members, spans, told)
    for request in asked:
        group.add(request)
    while not group.leader.idle:
        group.step()
        most = [max(before, cache.pages.pages) for before, cache in zip(most, group.caches, strict=True)]
    del group, members
    for splice in splices:
        splice.close()
    for holder in holders:
        holder.release()
    assert told.answers(asked) == said(model, [list(request.prompt) for request in asked], 40)
    assert left_out == []
    assert min(most) > 10
