"""Costs measured on batches as they are served: the fitted cost is that of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ballonet.hooks.batching.patches import batched
from ballonet.hooks.device import managers
from ballonet.hooks.replicas import process
from ballonet.hooks.replicas.microbatch_plan import Chunk, Request
from ballonet.hooks.replicas.process import measure_cost, sample_requests
from ballonet.hooks.replicas.replica_model import HostTimeMarks, SpanRunner
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

from ..models import build
from .stages import Replicas, install

LAYERS = 2
COST = ChunkCost(1e-6, 2e-5, 1e-3)
FEW = ReplicaTuning(requests_measured=24, answer_measured=6, rounds_measured=2)


def test_made_requests_are_of_all_sizes() -> None:
    lengths = [len(request.prompt) for request in sample_requests(ReplicaTuning(), 512)]
    assert len(lengths) == ReplicaTuning().requests_measured
    assert min(lengths) < 512 // 8 < 2 * 512 < max(lengths) <= ReplicaTuning().batches_measured * 512
    assert sum(length < 512 for length in lengths) > len(lengths) / 2
    assert [request.prompt for request in sample_requests(FEW, 512)] == [
        request.prompt for request in sample_requests(FEW, 512)
    ]
    *others, last = (request.new for request in sample_requests(ReplicaTuning(), 512))
    assert last > max(others) + 4, "it decodes alone at the end"


@pytest.mark.usefixtures("nothing_is_left")
def test_the_cost_is_that_of_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that passes as this cost says, but for the first round, which is as slow as kernels that are loaded."""
    now, seen = [0.0], list[tuple[tuple[int, int], ...]]()
    stock = SpanRunner._run

    def run(self: SpanRunner, chunks: Sequence[Chunk], *rest: Any) -> Any:
        sizes = tuple((chunk.before, len(chunk.ids)) for chunk in chunks)
        now[0] += COST.batch(sizes) if sizes in seen else 100.0
        seen.append(sizes)
        return stock(self, chunks, *rest)

    monkeypatch.setattr(SpanRunner, "_run", run)
    install()
    with Replicas([build("llama", num_hidden_layers=LAYERS)]) as (member,):
        measured = measure_cost(member, LAYERS, HostTimeMarks(lambda: now[0]), FEW)
        assert member.times is None, "what is served later is not counted here"
    assert measured.error < 1e-3
    assert measured.cost.seconds(40, 20) == pytest.approx(COST.seconds(40, 20), rel=1e-2)
    assert any(len({new == 1 for _, new in sizes}) == 2 for sizes in seen), "prompts and decoding requests together"
    assert any(sum(new for _, new in sizes) == 1 for sizes in seen), "one alone"


@pytest.mark.usefixtures("nothing_is_left")
def test_all_rounds_have_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what a batch takes, by the clock that its scheduler learns from, differs from one round to the next."""
    now, rounds = [0.0], list[list[tuple[tuple[int, int], ...]]]()
    run, stock = SpanRunner._run, process._batches

    def computed(self: SpanRunner, chunks: Sequence[Chunk], *rest: Any) -> Any:
        sizes = tuple((chunk.before, len(chunk.ids)) for chunk in chunks)
        rounds[-1].append(sizes)
        new, read = sum(size for _, size in sizes), sum(sum(size) for size in sizes)
        now[0] += COST.batch(sizes) + (1e-3 * new * read if len(rounds) > 1 else 0.0)
        return run(self, chunks, *rest)

    def batches(*given: Any) -> Any:
        rounds.append([])
        return stock(*given)

    monkeypatch.setattr(SpanRunner, "_run", computed)
    monkeypatch.setattr(process, "_batches", batches)
    install()
    with Replicas([build("llama", num_hidden_layers=LAYERS)]) as (member,):
        known: Any = batched(member.model)
        monkeypatch.setattr(managers.of(known.device), "clock", lambda: now[0])
        measure_cost(member, LAYERS, HostTimeMarks(lambda: now[0]), replace(FEW, rounds_measured=4))
    assert rounds == [rounds[0]] * 4


@pytest.mark.usefixtures("nothing_is_left")
def test_a_request_that_can_never_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Request("huge", (0,) * 100_000, 2)
    monkeypatch.setattr(process, "sample_requests", lambda *given: [huge, *sample_requests(*given)])
    now, stock = [0.0], SpanRunner._run

    def run(self: SpanRunner, chunks: Sequence[Chunk], *rest: Any) -> Any:
        now[0] += COST.batch([(chunk.before, len(chunk.ids)) for chunk in chunks])
        return stock(self, chunks, *rest)

    monkeypatch.setattr(SpanRunner, "_run", run)
    install(pages=64)
    with Replicas([build("llama", num_hidden_layers=LAYERS)]) as (member,):
        assert measure_cost(member, LAYERS, HostTimeMarks(lambda: now[0]), FEW).cost.seconds(8, 8) > 0


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("rounds", [4, 6])
def test_disturbed_batch_is_measured_again(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as all batches take the same nothing is known; after three tries that is an error."""
    now, stock, begun = [0.0], process._batches, [0]
    run = SpanRunner._run

    def computed(self: SpanRunner, chunks: Sequence[Chunk], *rest: Any) -> Any:
        now[0] += 100.0 if begun[0] <= rounds else COST.batch([(chunk.before, len(chunk.ids)) for chunk in chunks])
        return run(self, chunks, *rest)

    def batches(*given: Any) -> Any:
        begun[0] += 1
        return stock(*given)

    monkeypatch.setattr(SpanRunner, "_run", computed)
    monkeypatch.setattr(process, "_batches", batches)
    install()
    with Replicas([build("llama", num_hidden_layers=LAYERS)]) as (member,):
        if rounds == 6:
            with pytest.raises(ValueError, match="do not say"):
                measure_cost(member, LAYERS, HostTimeMarks(lambda: now[0]), FEW)
        else:
            assert measure_cost(member, LAYERS, HostTimeMarks(lambda: now[0]), FEW).error < 1e-2
    assert begun[0] == 6
