"""Parts of the simulation of replicas: links, memory policies, bytes of an exchange, loads."""

from __future__ import annotations

import pytest

from ballonet.hooks.server.load import RecordedArrival
from ballonet.hooks.virtual_replicas.drop_policy import DropPolicy
from ballonet.hooks.virtual_replicas.event_queue import EventQueue
from ballonet.hooks.virtual_replicas.fleet_run import FleetRun
from ballonet.hooks.virtual_replicas.jobs import Job
from ballonet.hooks.virtual_replicas.memory_policies import MigratePolicy, RecomputePolicy, SwapPolicy
from ballonet.hooks.virtual_replicas.pipeline import Pipeline
from ballonet.hooks.virtual_replicas.virtual_link import VirtualLink
from ballonet.offload.policy.replicas.actions import Action, StartRestore
from ballonet.offload.policy.replicas.demand import prompt_pages
from ballonet.offload.policy.replicas.events import Event, Load
from ballonet.offload.policy.replicas.groups import Group, Span, alone
from ballonet.offload.policy.replicas.restore_plan import Pull

from .fleets import COST, KV, SHAPE, SLOW, burst, fleet

MANY = [RecordedArrival(0.0, 100, 50)] * 6


def to_the_end(events: EventQueue) -> None:
    while events.step():
        pass


def test_a_message_has_come_once_all_its_parts_have_and_what_is_urgent_overtakes_it() -> None:
    events, seen = EventQueue(), list[tuple[str, float]]()
    link = VirtualLink(events, 10.0, 4)
    link.send(10, lambda: seen.append(("kv", events.now)))
    link.send(0, lambda: seen.append(("nothing", events.now)))
    events.at(0.1, lambda: link.send(2, lambda: seen.append(("activation", events.now)), urgent=True))
    to_the_end(events)
    assert seen == [("nothing", 0.0), ("activation", pytest.approx(0.6)), ("kv", pytest.approx(1.2))]
    assert link.moved == 10


def test_what_is_taken_back_never_comes_and_takes_no_time() -> None:
    events, seen, owner = EventQueue(), list[tuple[str, float]](), object()
    link = VirtualLink(events, 10.0, 4)
    link.send(10, lambda: seen.append(("old", events.now)), owner=owner)
    link.send(4, lambda: seen.append(("other", events.now)))
    events.at(0.1, lambda: link.cancel(owner))
    to_the_end(events)
    assert seen == [("other", pytest.approx(0.8))], "behind the part that was under way"
    assert link.moved == 8


def test_time_does_not_go_back() -> None:
    events, seen = EventQueue(), list[float]()
    events.at(1.0, lambda: events.at(0.0, lambda: seen.append(events.now)))
    to_the_end(events)
    assert seen == [1.0]


def running(keeper: RecomputePolicy, number: int = 0) -> tuple[Pipeline, list[Job]]:
    """A group, and jobs that decode in it, 100 tokens of KV each."""
    pipe = [*keeper.run.pipes.values()][number]
    jobs = keeper.run.jobs
    for job in jobs:
        job.kv, job.made = 100, 1
        assert pipe.grow(job, 100)
        pipe.resume(job)
    return pipe, jobs


def test_those_that_were_preempted_begin_before_others_and_in_order() -> None:
    keeper = RecomputePolicy(FleetRun(fleet(1, 1600), COST, MANY))
    pipe, jobs = running(keeper)
    new = Job(6, MANY[0])
    pipe.waiting.append(new)
    for job in (jobs[5], jobs[4]):
        keeper.preempt(pipe, job)
    assert [*pipe.waiting] == [jobs[4], jobs[5], new]
    assert pipe.used == 4 * 112
    assert jobs[5].kv == 0


@pytest.mark.parametrize(("room", "comes"), [(112 + 5 * 16, True), (112 + 5 * 16 - 16, False)])
def test_who_comes_back_leaves_room_for_the_next_tokens_of_others(room: int, comes: bool) -> None:
    keeper = SwapPolicy(FleetRun(fleet(1, 1600), COST, MANY))
    pipe, jobs = running(keeper)
    pipe.remove(jobs[0])
    pipe.release(jobs[0])
    keeper.host(pipe).away.append(jobs[0])
    pipe.capacity = pipe.used + room - 11  # 101 tokens of KV, in 7 blocks
    keeper.admit(pipe)
    assert (keeper.host(pipe).away == []) == comes
    to_the_end(keeper.run.events)
    assert jobs[0].ended == comes


def test_while_kv_is_exchanged_only_new_requests_begin() -> None:
    keeper = DropPolicy(FleetRun(fleet(1, 1600), COST, MANY))
    pipe, jobs = running(keeper)
    pipe.remove(jobs[0])
    pipe.release(jobs[0])
    keeper.host(pipe).away.append(jobs[0])
    new = Job(6, MANY[0])
    pipe.waiting.append(new)
    keeper.changes.exchanging.add(pipe)
    keeper.admit(pipe)
    assert keeper.host(pipe).away == [jobs[0]]
    assert new in pipe.prompts
    keeper.changes.exchanging.clear()
    keeper.admit(pipe)
    assert keeper.host(pipe).away == []


def test_a_request_that_ends_while_it_leaves_takes_no_room_with_it() -> None:
    """The network takes minutes for what a second of decoding takes."""
    arrivals = [
        *[RecordedArrival(0.0, 540, 100)] * 2,
        *[RecordedArrival(0.0, 96, 60)] * 10,
        RecordedArrival(0.3, 600, 5),
    ]
    run = FleetRun(fleet(2, 1650, network=1e3), SLOW, arrivals)
    keeper = MigratePolicy(run)
    left: list[int] = []

    def arrive(job: Job) -> None:
        members = (0 if job.number < 2 else 1,)
        keeper._dispatcher.promise(members, job.most)
        run.pipes[members].add(job)

    run.events.at(0.7, lambda: left.append(len(keeper._moves)))
    run.answers(arrive, lambda done: None)
    assert left == [1], "one was on its way"
    assert [pipe.used for pipe in run.pipes.values()] == [0, 0]
    assert keeper._moves == {}


def test_what_a_member_sends_is_what_others_need() -> None:
    keeper = DropPolicy(FleetRun(fleet(4, 1600), COST, MANY))
    (job, *_) = keeper.run.jobs
    job.kv = 100
    whole = 100 * KV
    pair = Group((0, 1), (Span(0, 3), Span(3, 8)))
    assert keeper.changes.bytes_to_send(job, 0, Span(0, 8), [pair], {}) == whole * 5 // 8
    assert keeper.changes.bytes_to_send(job, 1, Span(0, 8), [pair], {}) == whole * 3 // 8
    four = Group((0, 2, 1, 3), (Span(0, 2), Span(2, 3), Span(3, 6), Span(6, 8)))
    assert keeper.changes.bytes_to_send(job, 0, Span(0, 3), [four], {}) == whole // 8
    assert keeper.changes.bytes_to_send(job, 1, Span(3, 8), [four], {}) == whole * 2 // 8
    apart = [alone(0, 8), alone(1, 8)]
    assert keeper.changes.bytes_to_send(job, 0, Span(0, 3), apart, {"0": 0}) == 0, "it is at home"
    assert keeper.changes.bytes_to_send(job, 1, Span(3, 8), apart, {"0": 0}) == whole * 5 // 8


def test_a_layer_that_was_asked_for_again_comes_once() -> None:
    """A replica is paused as a layer arrives; then its source ends, and the layer is pulled from elsewhere."""
    run = FleetRun(fleet(2, 1600), COST, MANY)
    keeper = DropPolicy(run)
    to_the_end_of(run.events, 0.0)
    held = keeper.pulls.held
    held[0] = {0, 1, 2, 3}
    done: list[float] = []
    layers = [Pull(0, layer, 1) for layer in (4, 5, 6, 7)]
    keeper.pulls.begin(0, layers, lambda: done.append(run.events.now), lambda why: None)
    keeper.processes.pause(0, resumes=True)
    to_the_end_of(run.events, 1.0)
    assert held[0] == {0, 1, 2, 3}, "one has come, and is not looked at"
    keeper.processes.end(1)
    keeper.pulls.lose(1)
    began = run.events.now
    keeper.processes.resume(0)
    run.events.after(2.5 * SHAPE.layers[4] / run.fleet.link, lambda: done.append(-len(held[0])))
    to_the_end_of(run.events, 2.0)
    assert done[0] == -6, "the first was there, and was read again with the next two behind it"
    assert done[1] == pytest.approx(began + 4 * SHAPE.layers[4] / run.fleet.link)
    assert held[0] == {*range(8)}


def to_the_end_of(events: EventQueue, seconds: float) -> None:
    """Runs the simulation up to a time."""
    passed: list[None] = []
    events.at(seconds, lambda: passed.append(None))
    while not passed:
        events.step()


class Watched(DropPolicy):
    """Notes what the controller is told, and the capacities while layers are pulled."""

    def __init__(self, run: FleetRun) -> None:
        self.told: list[tuple[Load, int]] = []
        self.pulling: list[tuple[int, int]] = []
        super().__init__(run)

    def tell(self, event: Event) -> None:
        if isinstance(event, Load):
            members = next(each for each in self.active.groups if event.member in each)
            pipe = self.run.pipes[members]
            waits = prompt_pages((job.known for job in [*pipe.waiting, *self.host(pipe).away]), self.kv)
            self.told.append((event, waits if event.member == members[0] else 0))
        super().tell(event)

    def _perform(self, action: Action) -> None:
        before = [pipe.capacity for pipe in self.run.pipes.values()]
        super()._perform(action)
        if isinstance(action, StartRestore):
            self.pulling += zip(before, [pipe.capacity for pipe in self.run.pipes.values()], strict=True)


@pytest.fixture(scope="module")
def watched() -> Watched:
    keeper = Watched(FleetRun(fleet(2, 1600), SLOW, burst(240, 0.1, 60, 150) + burst(8, 6.0, 20, 20, begin=60.0)))
    keeper.run.answers(keeper.arrive, lambda done: None)
    return keeper


def test_a_group_tells_what_waits_in_it_once(watched: Watched) -> None:
    assert watched.changes.drops == 1
    assert all(load.pending == waits for load, waits in watched.told)
    assert max(load.pending for load, _ in watched.told) > 0
    assert all(load.used + load.free <= watched.run.fleet.pages for load, _ in watched.told)


def test_layers_that_are_pulled_take_memory(watched: Watched) -> None:
    ((before, during),) = watched.pulling
    assert during == 2 * watched.run.fleet.tokens < before
