"""Replicas in virtual time: whatever is done when memory is full, all tokens are made, once, and memory adds up."""

from __future__ import annotations

from collections import Counter

import pytest

from ballonet.allocator.errors import ManageError
from ballonet.hooks.server.arrivals import RecordedArrival
from ballonet.hooks.virtual_replicas.fleet_run import PeerRun
from ballonet.hooks.virtual_replicas.group_queue import GroupQueue, Job
from ballonet.hooks.virtual_replicas.memory_policies import RecomputePolicy, Swap
from ballonet.hooks.virtual_replicas.run import POLICIES, run
from ballonet.hooks.virtual_replicas.virtual_link import Wire
from ballonet.hooks.virtual_replicas.virtual_time import VirtualTime, VirtualWakeup
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.protocol import Commit, Decline, Entry, Prepare, Reason, StartRestore

from .virtual import COST, KV, SHAPE, SLOW, burst, decided, fleet, outcome

PEERS = tuple(policy for policy in POLICIES if policy != "drop")
TIGHT = burst(240, 0.008, 60, 150)  # about 45 requests at once, of 160 tokens on average: twice what fits
BURST = burst(240, 0.1, 60, 150) + burst(8, 6.0, 20, 20, begin=60.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_every_request_gets_all_its_tokens(policy: str, replicas: int) -> None:
    arrivals = burst(60 * replicas, 0.012 / replicas, 60, 150, seed=replicas)
    row = run(fleet(replicas, 1600), COST, arrivals, policy)
    assert (row["failed"], row["tokens"]) == (0, sum(arrival.new for arrival in arrivals))


@pytest.mark.parametrize("policy", PEERS)
def test_peers_give_all_memory_back(policy: str) -> None:
    peers = PeerRun(fleet(2, 1600), COST, TIGHT, policy)
    for answer, arrival in zip(peers.answers(), TIGHT, strict=True):
        assert len(answer.times) == arrival.new
        assert answer.times == sorted(answer.times)
    for server in peers.peers._servers:
        assert (server.queue.used, [*server.queue.running], [*server.queue.waiting]) == (0, [], [])


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_take_the_same_decisions(policy: str) -> None:
    logs: list[list[Entry]] = [[], []]
    rows = [run(fleet(4, 1600), COST, TIGHT, policy, (0.5, 0.1), log=log.append) for log in logs]
    assert rows[0] == rows[1]
    assert logs[0] == logs[1]
    assert bool(logs[0]) == (policy == "drop")


@pytest.mark.parametrize("policy", POLICIES)
def test_replica_with_room_takes_what_its_batches_take(policy: str) -> None:
    row = run(fleet(1, 4000), COST, [RecordedArrival(1.0, 300, 3)], policy)
    prompt = COST.batch([(0, 256)]) + COST.batch([(256, 44)])
    assert row["ttft_p50"] == pytest.approx(prompt)
    assert row["seconds"] == pytest.approx(1.0 + prompt + COST.batch([(300, 1)]) + COST.batch([(301, 1)]))


def test_only_swap_moves_bytes_and_host_without_room_has_requests_computed_anew() -> None:
    moved = {policy: run(fleet(2, 1600), COST, TIGHT, policy)["bytes_moved"] for policy in PEERS}
    assert moved["queue"] == moved["recompute"] == 0
    assert moved["swap"] > 0
    assert moved["swap"] % (2 * KV) == 0, "what went to the host came back"
    assert run(fleet(2, 1600, host=0), COST, TIGHT, "swap")["bytes_moved"] == 0


def test_running_request_leaves_a_replica_whose_queue_is_stuck() -> None:
    """One replica has two long requests, the other ten short ones and one that fits into neither."""
    ttft = {}
    for policy in ("migrate", "recompute"):
        arrivals = [RecordedArrival(0.0, 540, 100), RecordedArrival(0.0, 96, 60)] * 2
        arrivals += [RecordedArrival(0.0, 96, 60)] * 8 + [RecordedArrival(0.3, 600, 5)]
        peers = PeerRun(fleet(2, 1650), SLOW, arrivals, policy)
        choices = iter([(0,), (1,), (0,), *[(1,)] * 10])
        peers.peers._dispatcher.choose = lambda demand, choices=choices: next(choices)  # type: ignore[method-assign,misc]
        ttft[policy] = peers.answers()[-1].ttft
        assert all(server.queue.used == 0 for server in peers.peers._servers)
        assert (peers.bytes_moved > 0) == (policy == "migrate")
    assert ttft["migrate"] < 0.5 * ttft["recompute"]


def test_request_that_no_replica_can_ever_hold_is_refused() -> None:
    long = RecordedArrival(0.0, 1500, 2000)
    for policy in POLICIES:
        row = run(fleet(2, 1600), COST, [long, RecordedArrival(0.1, 20, 5)], policy)
        assert (row["requests"], row["failed"], row["refused"], row["tokens"]) == (2, 1, 1, 5)


def test_model_that_does_not_fit_and_unknown_policy_are_refused() -> None:
    with pytest.raises(ManageError, match="give more"):
        fleet(2, 8)
    with pytest.raises(ManageError, match="no policy 'lend' of replicas: there are queue"):
        run(fleet(2, 1600), COST, TIGHT, "lend")
    with pytest.raises(ManageError, match="no requests"):
        run(fleet(2, 1600), COST, [], "drop")


# Drops


def test_drop_has_requests_begin_sooner() -> None:
    ttft = {policy: run(fleet(2, 1600), SLOW, BURST, policy)["ttft_p99"] for policy in POLICIES}
    assert min(ttft[policy] for policy in PEERS) > 1.3 * ttft["drop"]


def test_burst_has_replicas_drop_and_restore() -> None:
    played = outcome([], BURST, fleet(2, 1600))
    state = played.run.supervisor.state()
    assert (state.drops, state.restores, played.groups) == (1, 1, [(0,), (1,)])
    pulled = [pull for _, action in decided(played.log) if isinstance(action, StartRestore) for pull in action.pulls]
    assert Counter(pull.layer for pull in pulled) == dict.fromkeys(range(8), 1), "each layer was dropped once"
    assert sum(SHAPE.layers[pull.layer] for pull in pulled) == sum(SHAPE.layers), "M (k - 1)"
    kv, layers = state.moved
    assert layers == sum(SHAPE.layers)
    assert kv > 0
    assert 0 < played.run.bubble < 0.2


def test_square_wave_has_one_drop_and_one_restore_in_a_period_at_most() -> None:
    period, periods = 80.0, 3
    wave = [arrival for n in range(periods) for arrival in burst(200, 0.08, 60, 150, seed=n, begin=n * period)]
    wave += burst(10, 6.0, 20, 20, begin=period * (periods - 1) + 22.0)  # or the run ends before the last restore
    log: list[Entry] = []
    row = run(fleet(2, 1600), SLOW, wave, "drop", log=log.append)
    assert row["drops"] == row["restores"] == periods
    for kind in (Prepare, Commit):
        at = [int(at / period) for at, action in decided(log) if isinstance(action, kind)]
        assert at == [n // 2 for n in range(2 * periods)], "two epochs in each"


def test_low_halves_shorter_than_the_dwell_are_no_reason_to_restore() -> None:
    wave = [arrival for n in range(4) for arrival in burst(60, 0.05, 60, 150, seed=n, begin=n * 16.0)]
    row = run(fleet(2, 1600), SLOW, wave, "drop")
    assert (row["drops"], row["restores"]) == (1, 0)


def test_no_layer_is_dropped_where_prompts_take_the_time() -> None:
    cost = ChunkCost(1e-9, 4e-4, 1e-3, decode=ChunkCost(0.0, 1e-4, 1e-3))
    rows, log = [], list[Entry]()
    for seed in range(3):  # P99 of one trace is that of one request of it
        prompts = burst(600, 0.045, 200, 12, seed=seed)
        rows.append({policy: run(fleet(2, 800), cost, prompts, policy, log=log.append) for policy in POLICIES})
    refused = [action for _, action in decided(log) if isinstance(action, Decline)]
    assert refused, "memory is full, so it was asked"
    assert all(action.reason is Reason.NO_GAIN for action in refused)
    assert all(row["drop"]["drops"] == 0 for row in rows)
    ours = sum(row["drop"]["ttft_p99"] for row in rows)
    assert ours <= 1.02 * sum(min(row[peer]["ttft_p99"] for peer in PEERS) for row in rows)


# Parts


def test_actions_of_one_time_happen_in_order_and_time_never_goes_back() -> None:
    time, seen = VirtualTime(), list[str]()
    time.at(2.0, lambda: seen.append("c"))

    def early() -> None:
        seen.append("a")
        time.at(0.0, lambda: seen.append("b"))

    time.at(1.0, early)
    time.at(2.0, lambda: seen.append("d"))
    while time.step():
        pass
    assert (seen, time.now()) == (["a", "b", "c", "d"], 2.0)


def test_tasks_wait_in_turns_and_end_from_outside() -> None:
    time, seen = VirtualTime(), list[tuple[str, float]]()
    wakeup, news = VirtualWakeup(time), list[str]()

    def waits() -> None:
        for _ in range(2):
            seen.append((wakeup.wait(lambda: news.pop() if news else None, 5.0) or "nothing", time.now()))
        time.sleep(100.0)
        seen.append(("never", time.now()))

    def tells() -> None:
        time.sleep(1.0)
        news.append("news")
        wakeup.notify()

    tasks = time.start(waits), time.start(tells)
    time.at(10.0, time.close)
    while time.step():
        pass
    assert seen == [("news", 1.0), ("nothing", 6.0)]
    assert all(task.is_over for task in tasks)


def test_error_of_a_task_is_raised_where_time_is_stepped() -> None:
    time = VirtualTime()
    time.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        time.step()


def test_wire_sends_one_message_after_the_other() -> None:
    time, seen = VirtualTime(), list[float]()
    wire = Wire(time, 10.0)
    for nbytes in (10, 0, 5):
        wire.send(nbytes, lambda: seen.append(time.now()))
    while time.step():
        pass
    assert (seen, wire.moved) == ([1.0, 1.0, 1.5], 15)


def running(queue: GroupQueue) -> list[Job]:
    """Puts jobs into a queue that decode, 100 tokens of KV each."""
    jobs = [Job(str(n), n, 100, 50, made=1, kv=100) for n in range(6)]
    for job in jobs:
        assert queue.grow(job, 100)
        queue.running[job] = None
    return jobs


def test_preempted_requests_begin_before_others_and_in_order() -> None:
    queue = GroupQueue(lambda: 1600, 16, 256, RecomputePolicy())
    jobs, new = running(queue), Job("6", 6, 100, 50)
    queue.waiting.append(new)
    for job in (jobs[5], jobs[4]):
        queue.preempt(job)
    assert [*queue.waiting] == [jobs[4], jobs[5], new]
    assert queue.used == 4 * 112
    assert jobs[5].kv == 0


@pytest.mark.parametrize(("room", "comes"), [(101 + 5 * 16, True), (101 + 5 * 16 - 1, False)])
def test_request_comes_back_from_the_host_if_others_keep_room_for_their_next_tokens(room: int, comes: bool) -> None:
    swap = Swap(lambda job, back, then: then(), 2**30, KV, 16)
    queue = GroupQueue(lambda: 1600, 16, 256, swap)
    jobs = running(queue)
    queue.remove(jobs[0])
    assert swap.put_away(jobs[0])
    queue.capacity = queue.used + room
    swap.admit(queue)
    assert (jobs[0] in queue.running) == comes
    assert ([*swap.away] == []) == comes
