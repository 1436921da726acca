"""Replicas in virtual time: whatever is done when memory is full, all tokens are made, once, and memory adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from ballonet.allocator.errors import ManageError
from ballonet.hooks.server.load import RecordedArrival
from ballonet.hooks.virtual_replicas.drop_policy import DropPolicy
from ballonet.hooks.virtual_replicas.event_queue import EventQueue
from ballonet.hooks.virtual_replicas.fleet_run import FleetRun
from ballonet.hooks.virtual_replicas.jobs import Job
from ballonet.hooks.virtual_replicas.memory_policies import RecomputePolicy
from ballonet.hooks.virtual_replicas.run import POLICIES, run
from ballonet.offload.policy.replicas.actions import Commit, Decline, Prepare, StartRestore
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.decisions import Entry
from ballonet.offload.policy.replicas.events import Reason
from ballonet.offload.policy.replicas.link_order import waited
from ballonet.offload.policy.replicas.pipeline_time import evenly, pipeline_time

from .fleets import COST, KV, PAGE, SHAPE, SLOW, burst, decided, fleet, played

ALL = tuple(POLICIES)
TIGHT = burst(240, 0.008, 60, 150)  # about 45 requests at once, of 160 tokens on average: twice what fits


class Noted(ChunkCost):
    """A cost that notes what it was asked for."""

    batches: list[tuple[tuple[int, int], ...]]

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        given = tuple(chunks)
        self.batches.append(given)
        return super().batch(given)


def noted() -> Noted:
    cost = Noted(COST.alpha, COST.beta, COST.gamma, decode=COST.decode)
    object.__setattr__(cost, "batches", [])
    return cost


def tokens(cost: Noted) -> int:
    """New tokens of all batches."""
    return sum(new for batch in cost.batches for _, new in batch)


def adds_up(run: FleetRun) -> None:
    """No memory is used twice, and none is lost."""
    for pipe in run.pipes.values():
        held = [*pipe.jobs(), *pipe.stalled]
        assert len({*held}) == len(held)
        assert sum(job.held for job in held) <= pipe.used
        assert all(job.held == 0 for job in pipe.waiting)


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_all_tokens_are_made_in_order_and_all_memory_is_given_back(policy: str, replicas: int) -> None:
    arrivals = burst(60 * replicas, 0.012 / replicas, 60, 150, seed=replicas)
    found, keeper = played(policy, fleet(replicas, 1600), arrivals, watch=adds_up)
    for job in found.jobs:
        assert not job.answer.error
        assert len(job.answer.times) == job.answer.tokens == job.arrival.new
        assert job.answer.times == sorted(job.answer.times)
        assert job.answer.ttft >= COST.seconds(0, job.arrival.prompt) / max(1, replicas) - 1e-9
        assert (job.held, job.in_flight, job.stalled) == (0, 0, False)
    for pipe in found.pipes.values():
        assert (pipe.used, pipe.in_flight, [*pipe.jobs()], [*pipe.waiting], pipe.stalled) == (0, 0, [], [], [])
    if isinstance(keeper, DropPolicy):
        keeper.controller.check()


@pytest.mark.parametrize("policy", ALL)
def test_two_runs_take_the_same_decisions(policy: str) -> None:
    logs: list[list[Entry]] = [[], []]
    found = [run(fleet(4, 1600), COST, TIGHT, policy, (0.5, 0.1), log=log.append) for log in logs]
    assert found[0] == found[1]
    assert logs[0] == logs[1]
    assert bool(logs[0]) == (policy == "drop")


def test_a_replica_that_has_room_takes_what_its_batches_take() -> None:
    found, _ = played("recompute", fleet(1, 4000), [RecordedArrival(1.0, 300, 3)])
    first = 1.0 + COST.seconds(0, 256) + COST.seconds(256, 44)
    second = first + COST.seconds(300, 1)
    assert found.jobs[0].answer.times == pytest.approx([first, second, second + COST.seconds(301, 1)])


def test_who_waits_or_swaps_computes_nothing_twice_and_who_recomputes_does() -> None:
    once = sum(each.prompt + each.new - 1 for each in TIGHT)
    computed, moved = {}, {}
    for policy in ("queue", "recompute", "swap"):
        cost = noted()
        found, _ = played(policy, fleet(2, 1600), TIGHT, cost)
        computed[policy], moved[policy] = tokens(cost), found.bytes_moved
    assert computed["queue"] == computed["swap"] == once
    assert computed["recompute"] > once
    assert moved["queue"] == moved["recompute"] == 0
    assert moved["swap"] > 0
    assert moved["swap"] % (2 * KV) == 0, "what went to the host came back"


def test_a_host_without_room_has_requests_computed_anew() -> None:
    cost = noted()
    found, _ = played("swap", fleet(2, 1600, host=0), TIGHT, cost)
    assert found.bytes_moved == 0
    assert tokens(cost) > sum(each.prompt + each.new - 1 for each in TIGHT)


def test_a_request_that_runs_leaves_a_replica_whose_queue_is_stuck() -> None:
    """One replica has two long requests, the other ten short ones and one that fits into neither."""
    running = [RecordedArrival(0.0, 540, 100)] * 2 + [RecordedArrival(0.0, 96, 60)] * 10
    arrivals = [*running, RecordedArrival(0.3, 600, 5)]
    ttft = {}
    for policy in ("migrate", "recompute"):
        run = FleetRun(fleet(2, 1650), SLOW, arrivals)
        keeper = POLICIES[policy](run)

        def arrive(job: Job, keeper: RecomputePolicy = keeper) -> None:
            members = (0 if job.number < 2 else 1,)
            keeper._dispatcher.promise(members, job.most)
            keeper.run.pipes[members].add(job)

        run.answers(arrive, lambda done: None)
        ttft[policy] = run.jobs[-1].answer.ttft
        assert all(pipe.used == 0 for pipe in run.pipes.values())
        assert (run.bytes_moved > 0) == (policy == "migrate")
    assert ttft["migrate"] < 0.5 * ttft["recompute"]


def test_what_no_replica_can_ever_hold_is_refused() -> None:
    long = RecordedArrival(0.0, 1500, 2000)
    for policy in ALL:
        found = run(fleet(2, 1600), COST, [long, RecordedArrival(0.1, 20, 5)], policy)
        assert (found["requests"], found["failed"], found["refused"], found["tokens"]) == (2, 1, 1, 5)


def test_a_model_that_does_not_fit_and_a_policy_that_is_none_are_refused() -> None:
    with pytest.raises(ManageError, match="give more"):
        fleet(2, 8)
    with pytest.raises(ManageError, match="no policy 'lend' of replicas: there are queue"):
        run(fleet(2, 1600), COST, TIGHT, "lend")
    with pytest.raises(ManageError, match="no requests"):
        run(fleet(2, 1600), COST, [], "drop")


# Pipelines


def test_a_pipeline_takes_what_its_timeline_says() -> None:
    """Prompts alone, all there at once: microbatches follow one another as in pipeline_time."""
    cost = noted()
    free = fleet(2, 10**6, shape=type(SHAPE)(SHAPE.layers, SHAPE.rest, SHAPE.kv, 0))
    arrivals = [RecordedArrival(0.0, 1000 + 37 * n, 1) for n in range(9)]
    run = FleetRun(free, cost, arrivals)
    keeper = RecomputePolicy(run)
    pipe = run.open((0, 1), (4, 4), free.tokens, keeper)
    keeper._dispatcher.add((0, 1), free.tokens)

    def arrive(job: Job) -> None:
        keeper._dispatcher.promise((0, 1), job.most)
        pipe.waiting.append(job)
        if len(pipe.waiting) == len(arrivals):
            pipe.pump()

    run.answers(arrive, lambda done: None)
    took = [COST.batch(batch) for batch in cost.batches]
    line = pipeline_time(evenly(took, 2))
    assert len(took) > 9
    assert run.events.now == pytest.approx(line.seconds)
    assert run.bubble == pytest.approx(line.bubble)
    assert run.bubble < 0.05


BURST = burst(240, 0.1, 60, 150) + burst(8, 6.0, 20, 20, begin=60.0)


def dropped(network: float = 1e9) -> tuple[FleetRun, DropPolicy]:
    found, keeper, _ = dropped_and_noted(network)
    return found, keeper


def dropped_and_noted(network: float = 1e9) -> tuple[FleetRun, DropPolicy, list[Entry]]:
    log: list[Entry] = []
    found, keeper = played("drop", fleet(2, 1600, network=network), BURST, SLOW, watch=adds_up, log=log.append)
    assert isinstance(keeper, DropPolicy)
    return found, keeper, log


def test_a_drop_has_requests_begin_sooner() -> None:
    ttft = {policy: run(fleet(2, 1600), SLOW, BURST, policy)["ttft_p99"] for policy in ALL}
    assert min(ttft[policy] for policy in ALL if policy != "drop") > 1.3 * ttft["drop"]


def test_a_burst_has_replicas_drop_and_restore_and_all_get_their_tokens() -> None:
    found, keeper, log = dropped_and_noted()
    assert (keeper.changes.drops, keeper.changes.restores) == (1, 1)
    assert [pipe.members for pipe in found.pipes.values()] == [(0,), (1,)]
    assert all(pipe.capacity == found.fleet.tokens for pipe in found.pipes.values())
    pulled = [pull for _, action in decided(log) if isinstance(action, StartRestore) for pull in action.pulls]
    assert Counter(pull.layer for pull in pulled) == dict.fromkeys(range(8), 1), "each layer was dropped once"
    weights = sum(SHAPE.layers[pull.layer] for pull in pulled)
    assert weights == sum(SHAPE.layers), "M (k - 1)"
    kv = found.bytes_moved - weights
    assert kv > 0
    assert kv % (KV // 2) == 0, "halves of tokens"


def test_activations_wait_for_one_part_at_most() -> None:
    found, _ = dropped(network=2e7)
    logs = [found.link_of(member).order.log for member in (0, 1)]
    assert sum(each.urgent for log in logs for each in log) > 100
    assert sum(not each.urgent for log in logs for each in log) > 20
    assert max(map(waited, logs)) <= 1
    part = found.fleet.part(SLOW)
    assert part % PAGE == 0
    assert max(each.nbytes for log in logs for each in log if not each.urgent) <= part


def test_what_happens_in_one_moment_happens_in_order() -> None:
    events, seen = EventQueue(), list[str]()
    events.at(2.0, lambda: seen.append("c"))

    def early() -> None:
        seen.append("a")
        events.at(0.0, lambda: seen.append("b"))

    events.at(1.0, early)
    events.at(2.0, lambda: seen.append("d"))
    while events.step():
        pass
    assert (seen, events.now) == (["a", "b", "c", "d"], 2.0)


def test_on_a_square_wave_there_is_one_drop_and_one_restore_in_a_period_at_most() -> None:
    period, periods = 80.0, 3
    wave = [each for n in range(periods) for each in burst(200, 0.08, 60, 150, seed=n, begin=n * period)]
    wave += burst(10, 6.0, 20, 20, begin=period * (periods - 1) + 22.0)  # or the run ends before the last restore
    log: list[Entry] = []
    found = run(fleet(2, 1600), SLOW, wave, "drop", log=log.append)
    assert found["drops"] == found["restores"] == periods
    for kind in (Prepare, Commit):
        at = [int(at / period) for at, action in decided(log) if isinstance(action, kind)]
        assert at == [n // 2 for n in range(2 * periods)], "two epochs in each"


def test_where_prompts_are_what_takes_time_nothing_is_dropped() -> None:
    prompts = burst(600, 0.045, 200, 12)
    cost = ChunkCost(1e-9, 4e-4, 1e-3, decode=ChunkCost(0.0, 1e-4, 1e-3))
    found = {policy: run(fleet(2, 800), cost, prompts, policy) for policy in ALL}
    log: list[Entry] = []
    again = run(fleet(2, 800), cost, prompts, "drop", log=log.append)
    assert again == found["drop"]
    refused = [action for _, action in decided(log) if isinstance(action, Decline)]
    assert refused, "memory is full, so it was asked"
    assert all(each.reason is Reason.NO_GAIN for each in refused)
    assert found["drop"]["drops"] == 0
    # P99 of one trace is that of one request of it: over three
    more = [burst(600, 0.045, 200, 12, seed=seed) for seed in (1, 2)]
    every = [found, *({policy: run(fleet(2, 800), cost, each, policy) for policy in ALL} for each in more)]
    ours = sum(each["drop"]["ttft_p99"] for each in every)
    assert ours <= 1.02 * sum(min(peer["ttft_p99"] for peer in each.values()) for each in every)
