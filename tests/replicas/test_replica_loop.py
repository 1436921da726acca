"""Main loops of two replicas in one thread, told what a supervisor would tell: drops, restores, and what goes wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import WeightsFileChanged
from ballonet.hooks.replicas.errors import Interrupted, LinkClosed, LinkError, NoAnswer
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.hooks.replicas.layer_moves import ReplicaSetup
from ballonet.hooks.replicas.link import LinkState
from ballonet.hooks.replicas.messages import Counted, End, Message, Start, SupervisorRestarted, Told
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.replica import Replica
from ballonet.hooks.replicas.replica_model import GroupSettings, ReplicaModel
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.cluster import Heartbeat
from ballonet.offload.policy.replicas.drops import Pull
from ballonet.offload.policy.replicas.groups import Group, Span, alone
from ballonet.offload.policy.replicas.protocol import Alone, Cancel, Commit, Discard, Prepare, StartRestore

from ..models import build
from ..pool import take_out
from ..serving.batches import prompts
from ..tuned import Clock, Tuned
from .stages import BLOCK, CHUNK, Desk, Inbox, MemoryLink, answered, chosen, requests

LAYERS, PAGE = 4, 4096
PAIR = (Group((0, 1), (Span(0, 2), Span(2, LAYERS))),)
ONES = (alone(0, LAYERS), alone(1, LAYERS))
PULLS = (Pull(0, 2, 1), Pull(0, 3, 1), Pull(1, 0, 0), Pull(1, 1, None))
STEPS = 2000  # of all loops, until a test is given up


class Pumped(MemoryLink):
    """A link whose other end sends layers that are asked for while this one waits."""

    def __init__(self, sent: Inbox, came: Inbox) -> None:
        super().__init__(sent, came)
        self.error: LinkError | None = None
        self.pump: Callable[[], object] = bool

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False, check: bool = False) -> None:
        if self.error is not None:
            raise self.error
        super().send(tensor, tag, urgent, check)

    def has(self, tag: str) -> bool:
        return self.error is not None or super().has(tag)

    def take(self, tag: str) -> torch.Tensor | None:
        if self.error is not None:
            raise self.error
        return super().take(tag)

    def recv(self, tag: str, timeout: float, unless: Callable[[], bool]) -> torch.Tensor:
        self.pump()
        if unless():
            raise Interrupted(tag)
        received = self.take(tag)
        if received is None:
            raise NoAnswer(tag, timeout)
        return received


class LinkClock(Clock):
    """A step passes at each look, and the time that weights take over a slow link to the host, once there is one."""

    def __init__(self) -> None:
        super().__init__(step=0.05)
        self._byte, self._before = 0.0, 0

    def slow(self, bandwidth: float) -> None:
        """`bandwidth`: bytes per second."""
        self._byte, self._before = 1 / bandwidth, self._copied()

    def __call__(self) -> float:
        return super().__call__() + self._byte * (self._copied() - self._before)

    def _copied(self) -> int:
        copied = devices.require().snapshot()["copied"]
        return int(copied["weights_d2h"] + copied["weights_h2d"])


class Watched(Desk):
    """A supervisor that judges whether the replica lives, once it is to. `dead`: it was taken for dead; `loads`:
    heartbeats so far."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._heart: Heartbeat | None = None
        self.loads = 0
        self.dead = False

    def judge(self) -> None:
        """From now on."""
        self._heart = Heartbeat(self._clock())

    def post(self, *messages: Message) -> None:
        super().post(*messages)
        for message in messages:
            if self._heart is not None and isinstance(message, protocol.Load):
                self.loads += 1
                self.dead |= self._heart.is_dead(now := self._clock())
                self._heart.beat(now, message.progress)


class Loops:
    """Two replicas, which are on their own in epochs 1 and 2."""

    def __init__(self, members: list[ReplicaModel], holds: list[HeldLayers]) -> None:
        self.clocks = LinkClock(), LinkClock()
        self.desks = Watched(self.clocks[0]), Watched(self.clocks[1])
        self.holds = holds
        self.links: dict[tuple[int, int], Pumped] = {}  # by epoch, and whose end
        wakeup: Any = SimpleNamespace(wait=lambda look, timeout: look())
        self.loops = [
            Replica(
                ReplicaSetup(n, members[n], LAYERS, holds[n], self.desks[n], self._connecting(n), self.clocks[n]),
                wakeup,
            )
            for n in (0, 1)
        ]
        for n in (0, 1):
            self.tell(n, Alone(n + 1, n))
            self.until(protocol.Committed(0.0, n + 1, n))

    def _connecting(self, me: int) -> Any:
        def connect(epoch: int, peer: int) -> Pumped:
            if (epoch, me) not in self.links:
                self.links[epoch, me], self.links[epoch, peer] = ends = Pumped.pair()
                for number, end in zip((me, peer), ends, strict=True):
                    assert isinstance(end, Pumped)
                    end.pump = self.loops[1 - number]._moves.serve
            return self.links[epoch, me]

        return connect

    def tell(self, member: int, *messages: Message) -> None:
        """Sends messages; the preparation of an epoch says which groups end."""
        stages = [loop._state.stage for loop in self.loops]
        old = tuple({stage.group.members for stage in stages if stage is not None})
        self.desks[member].said.extend(
            replace(message, old=old) if isinstance(message, Prepare) else message for message in messages
        )

    def tell_all(self, *messages: Message) -> None:
        for member in (0, 1):
            self.tell(member, *messages)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for loop in self.loops:
                loop.step()

    def until(self, *wanted: Message) -> None:
        """Runs both until these were heard."""
        for _ in range(STEPS):
            if all(any(kind in desk.heard for desk in self.desks) for kind in wanted):
                return
            self.step()
        raise AssertionError(f"{wanted} was not heard: {[desk.heard[-5:] for desk in self.desks]}")

    def both(self, kind: Callable[..., Message], epoch: int) -> None:
        self.until(*(kind(0.0, epoch, member) for member in (0, 1)))

    def heard(self, kind: type[Any]) -> list[Any]:
        return [message for desk in self.desks for message in desk.heard if isinstance(message, kind)]

    def counted(self) -> list[Counted]:
        """Returns the latest `Counted` of each replica."""
        return [[message for message in desk.heard if isinstance(message, Counted)][-1] for desk in self.desks]

    def ask(self, member: int, epoch: int, *asked: Request, assignment: int = 1) -> None:
        self.tell(member, *(Start(epoch, replace(request, assignment=assignment)) for request in asked))

    def answers(self, asked: list[Request]) -> list[list[int]]:
        """What was told of them, once they are over: each token once, in order."""
        tokens: dict[str, list[int]] = {request.name: [] for request in asked}
        for _ in range(STEPS):
            self.step()
            told = self.heard(Told)
            if sum(len(report.tokens) for report in told) >= sum(request.new for request in asked):
                break
        for part in sorted(told, key=lambda part: part.before):
            assert part.error is None
            assert part.before == len(tokens[part.request])
            tokens[part.request] += [token.token for token in part.tokens]
        return [tokens[request.name] for request in asked]

    def drop(self, epoch: int) -> None:
        self.tell_all(Prepare(epoch, PAIR))
        self.both(protocol.Prepared, epoch)
        self.tell_all(Commit(epoch))
        self.both(protocol.Committed, epoch)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(prompts(5, 2 * CHUNK), 10)


@pytest.fixture(scope="module")
def right(model: Any, asked: list[Request]) -> list[list[int]]:
    ballonet.install(2**24, page_size=PAGE, host_budget=2**22, device="cpu")
    answers = answered(model, asked, 1)
    take_out()
    return answers


def settings_of(model: Any) -> GroupSettings:
    return GroupSettings.of(model, CHUNK, page_size=BLOCK)


@pytest.fixture
def loops(right: object, tuned: Tuned) -> Iterator[Loops]:
    tuned(weights={"large": 2**11, "moved": PAGE})  # so that tiny layers have ranges, and pieces
    ballonet.install(2**24, page_size=PAGE, host_budget=2**22, device="cpu")
    models = [build("llama", num_hidden_layers=LAYERS) for _ in range(2)]
    with ExitStack() as stack:
        held = [HeldLayers(stack.enter_context(ballonet.manage(replica))) for replica in models]
        members = [
            ReplicaModel(f"r{n}", replica, stack.enter_context(Splice(replica)), settings_of(replica))
            for n, replica in enumerate(models)
        ]
        made = Loops(members, held)
        yield made
        made.tell_all(End())
        while made.loops:
            made.loops.pop().run()
        made.links.clear()
    del made, members
    gc.collect()
    device = devices.require()
    device.reap(wait=True)
    assert device.snapshot()["pages"]["kv"] == 0
    take_out()


def test_requests_go_through_a_drop_and_a_restore(loops: Loops, asked: list[Request], right: list[list[int]]) -> None:
    loops.ask(0, 1, *asked[:2])
    loops.ask(1, 2, asked[2])
    loops.step(3)
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)
    assert [held.dropped for held in loops.holds] == [(), ()]
    loops.tell_all(Commit(3))
    loops.ask(0, 3, asked[3])  # before it has taken up the epoch
    loops.both(protocol.Committed, 3)
    assert [held.dropped for held in loops.holds] == [(2, 3), (0, 1)]
    loops.both(protocol.Exchanged, 3)
    assert all(counted.kv_bytes > 0 and counted.layers == 2 for counted in loops.counted())
    loops.step(3)
    loops.tell_all(Prepare(4, ONES))
    loops.both(protocol.Prepared, 4)
    loops.tell_all(StartRestore(4, PULLS))
    loops.both(protocol.Restored, 4)
    assert [held.dropped for held in loops.holds] == [(), ()]
    assert [(counted.layer_bytes, counted.layers) for counted in loops.counted()] == [
        (weight_bytes(loops, 1, (0,)), LAYERS),
        (weight_bytes(loops, 0, (2, 3)), LAYERS),
    ]
    loops.tell_all(Commit(4, homes=(("q0", 0), ("q1", 1), ("q2", 1), ("q3", 0))))
    loops.ask(1, 4, asked[4])
    loops.both(protocol.Committed, 4)
    loops.both(protocol.Exchanged, 4)
    assert loops.answers(asked) == right
    assert {report.assignment for report in loops.heard(Told)} == {1}


def test_kv_for_an_epoch_that_a_replica_has_not_begun_ends_no_wait(
    loops: Loops, asked: list[Request], right: list[list[int]]
) -> None:
    """A main loop that such KV woke would turn without end until the epoch begins, and take nothing."""
    loops.ask(0, 1, asked[0])
    loops.step(3)
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)
    loops.tell(0, Commit(3))
    loops.step(3)
    assert loops.links[3, 1].has("kv")
    assert not loops.loops[1]._has_input()
    loops.tell(1, Commit(3))
    loops.both(protocol.Exchanged, 3)
    assert loops.answers(asked[:1]) == right[:1]


def test_link_closed_by_a_peer_that_has_begun_the_next_epoch_ends_no_wait(
    loops: Loops, asked: list[Request], right: list[list[int]]
) -> None:
    loops.ask(0, 1, asked[0])
    loops.step(3)
    loops.drop(3)
    loops.both(protocol.Exchanged, 3)
    loops.tell_all(Prepare(4, ONES))
    loops.both(protocol.Prepared, 4)
    loops.tell_all(StartRestore(4, PULLS))
    loops.both(protocol.Restored, 4)
    loops.links[3, 1].error = LinkClosed(3, 0, "the other end has closed it")
    loops.loops[1].step()
    assert not loops.loops[1]._has_input()
    loops.tell_all(Commit(4, homes=(("q0", 0),)))
    loops.both(protocol.Exchanged, 4)
    assert loops.answers(asked[:1]) == right[:1]


def weight_bytes(loops: Loops, to: int, layers: Sequence[int]) -> int:
    """Bytes of layers, which another replica pulled."""
    modules = [loops.loops[to]._setup.replica.model.model.layers[layer] for layer in layers]
    return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("way", ["prepare", "restore"])
def test_replica_that_moves_a_layer_for_seconds_is_not_taken_for_dead(loops: Loops, way: str) -> None:
    """Each layer takes three seconds over the link, three times what a main loop may be silent."""
    loop, desk, held = loops.loops[0], loops.desks[0], loops.holds[0]
    if way == "restore":
        held.drop(Span(0, 2))
    loops.clocks[0].slow(weight_bytes(loops, 0, (3,)) / 3)
    desk.judge()
    before = loops.clocks[0]()
    if way == "restore":
        loops.tell(0, StartRestore(1, (Pull(0, 2, None), Pull(0, 3, None))))
    for _ in range(20):
        loop.step()
    assert (len(held.ready), held.dropped) == (LAYERS, ())
    assert loops.clocks[0]() > before + 6
    assert not desk.dead
    assert desk.loads > 6


def test_replica_that_pulls_from_a_slow_peer_is_not_taken_for_dead(loops: Loops) -> None:
    """Each tensor comes before the loop would say that it waits, and all together take seconds."""
    loops.drop(3)
    recv = loops.links[3, 0].recv

    def slow(tag: str, *more: Any) -> torch.Tensor:
        loops.clocks[0].now += 0.19 if tag == "weights" else 0
        return recv(tag, *more)

    loops.links[3, 0].recv = slow  # type: ignore[method-assign]
    loops.desks[0].judge()
    before = loops.clocks[0]()
    loops.tell(0, StartRestore(3, (Pull(0, 2, 1), Pull(0, 3, 1))))
    loops.until(protocol.Restored(0.0, 3, 0))
    assert loops.clocks[0]() > before + 2
    assert not loops.desks[0].dead


def test_a_request_that_comes_before_the_others_of_its_group_is_begun(
    loops: Loops, asked: list[Request], right: list[list[int]]
) -> None:
    """The first stage has no KV to wait for, and the second one is late."""
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)
    loops.tell(0, Commit(3))
    for _ in range(20):
        loops.loops[0].step()
    loops.tell(1, Commit(3))
    loops.both(protocol.Committed, 3)
    loops.ask(0, 3, *asked)
    for _ in range(5):
        loops.loops[0].step()
    assert loops.answers(asked) == right


def test_a_request_whose_kv_was_damaged_waits_for_the_supervisor(
    loops: Loops, asked: list[Request], right: list[list[int]]
) -> None:
    """The supervisor is told who got it damaged, and gives the request anew; others go on with their KV."""
    loops.ask(1, 2, *asked[:3])
    loops.step(4)
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)
    link = loops.links[3, 1]
    send, wrong = link.send, iter([True])

    def damages(tensor: torch.Tensor, tag: str, *more: Any, **named: Any) -> None:
        if tag == "kv" and next(wrong, False):
            tensor = tensor + 1
        send(tensor, tag, *more, **named)

    link.send = damages  # type: ignore[method-assign]
    loops.tell_all(Commit(3))
    loops.both(protocol.Exchanged, 3)
    [damaged] = loops.heard(protocol.Damaged)
    assert (damaged.epoch, damaged.member) == (3, 0)
    done = sum(len(report.tokens) for report in loops.heard(Told) if report.request == damaged.request)
    loops.step(20)
    assert done == sum(len(report.tokens) for report in loops.heard(Told) if report.request == damaged.request) < 10
    (lost, expected) = next(pair for pair in zip(asked, right, strict=True) if pair[0].name == damaged.request)
    again = Request(lost.name, lost.prompt, lost.new, lost.sampling, delivered=chosen(*expected[:done]))
    loops.ask(0, 3, again, assignment=2)
    assert loops.answers(asked[:3]) == right[:3]
    told = loops.heard(Told)
    assert {report.request for report in told if report.assignment == 2} == {damaged.request}


def test_replica_that_is_to_join_anew_leaves_and_has_nothing_of_its_group(loops: Loops, asked: list[Request]) -> None:
    loops.drop(3)
    loops.ask(0, 3, *asked)
    loops.step(6)
    loops.tell(1, SupervisorRestarted(), Start(3, asked[0]))
    assert loops.loops[1].run() == ()
    assert loops.loops[1]._state.stage is None
    assert loops.loops[1]._state.links == {}


def test_replica_that_goes_on_alone_has_all_its_layers_at_once(
    loops: Loops, asked: list[Request], right: list[list[int]]
) -> None:
    """A link is lost: that is told once, requests are given anew; layers that were dropped stream, and come home."""
    loops.drop(3)
    loops.ask(0, 3, *asked)
    loops.step(4)
    loops.links[3, 0].error = LinkError(3, 1, "planted")
    loops.until(protocol.Suspected(0.0, 3, 0, 1))
    before = len(loops.heard(Told))
    loops.step(3)
    assert len(loops.heard(Told)) == before
    assert loops.holds[0].dropped == (2, 3)
    loops.tell(0, Alone(4, 0))
    loops.until(protocol.Committed(0.0, 4, 0))
    delivered = {report.request: report.before + len(report.tokens) for report in loops.heard(Told)}
    again = [
        Request(
            request.name,
            request.prompt,
            request.new,
            request.sampling,
            delivered=chosen(*tokens[: delivered.get(request.name, 0)]),
        )
        for request, tokens in zip(asked, right, strict=True)
    ]
    loops.ask(0, 4, *again, assignment=2)
    loops.until(protocol.Restored(0.0, 4, 0))
    assert loops.holds[0].dropped == ()
    assert loops.answers(asked) == right
    assert len(loops.heard(protocol.Suspected)) == 1


def test_an_epoch_that_is_given_up_changes_nothing(loops: Loops, asked: list[Request], right: list[list[int]]) -> None:
    loops.ask(0, 1, *asked[:3])
    loops.ask(1, 2, *asked[3:])
    loops.step(2)
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)
    loops.tell_all(Discard(3, protocol.Reason.TIMEOUT), Commit(3))
    assert loops.answers(asked) == right
    assert [held.dropped for held in loops.holds] == [(), ()]
    assert [event for event in loops.heard(protocol.Committed) if event.epoch == 3] == []


@pytest.mark.parametrize("looks", [0, 1, 2, 3, 4])
def test_a_pipeline_goes_on_where_the_next_epoch_is_given_up_while_a_stage_waits(
    loops: Loops, asked: list[Request], right: list[list[int]], looks: int
) -> None:
    """A restore is given up under load: the second stage may have a plan, and wait for what comes with it."""
    loops.drop(3)
    loops.ask(0, 3, *asked)
    loops.step(4)
    loops.tell_all(Prepare(4, ONES))
    loops.both(protocol.Prepared, 4)
    given_up = Discard(4, protocol.Reason.OVERLOAD)
    loops.tell(0, given_up)
    loops.desks[1].late.extend([*[None] * looks, given_up])
    assert loops.answers(asked) == right
    assert not loops.heard(protocol.Suspected)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (lambda: WeightsFileChanged("a file", "planted"), protocol.Reason.FILE_CHANGED),
        (torch.OutOfMemoryError, protocol.Reason.PAGES),
    ],
)
def test_failure_in_prepare_or_in_a_pull_is_told_with_its_reason(
    loops: Loops, error: Callable[[], Exception], reason: protocol.Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Iterator[object]:
        raise error()
        yield

    loops.step(20)  # all is ready
    with monkeypatch.context() as planted:
        planted.setattr(loops.holds[1], "prepare", fails)
        loops.tell_all(Prepare(3, PAIR))
        loops.until(protocol.PrepareFailed(0.0, 3, 1, reason))
    loops.drop(4)
    monkeypatch.setattr(loops.holds[0], "restore", fails)
    loops.tell_all(Prepare(5, ONES))
    loops.both(protocol.Prepared, 5)
    loops.tell_all(StartRestore(5, PULLS))
    loops.until(protocol.PullFailed(0.0, 5, 0, reason), protocol.Restored(0.0, 5, 1))
    assert loops.holds[0].dropped == (2, 3)


def test_replica_that_cannot_drop_its_layers_after_all_goes_on_alone(
    loops: Loops, asked: list[Request], right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is told as of a link that failed: the supervisor ends the group and has the requests."""
    loops.ask(0, 1, *asked)
    loops.step(3)
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)

    def changed(span: Span) -> int:
        raise WeightsFileChanged("a file", "planted")

    with monkeypatch.context() as planted:
        planted.setattr(loops.holds[0], "drop", changed)
        loops.tell_all(Commit(3))
        loops.until(protocol.Suspected(0.0, 3, 0, 1))
    assert loops.holds[0].dropped == ()
    done = {report.request: report.before + len(report.tokens) for report in loops.heard(Told)}
    loops.tell_all(Alone(4, 0), Alone(4, 1))
    again = [
        Request(
            request.name,
            request.prompt,
            request.new,
            request.sampling,
            delivered=chosen(*tokens[: done.get(request.name, 0)]),
        )
        for request, tokens in zip(asked, right, strict=True)
    ]
    loops.ask(0, 4, *again, assignment=2)
    assert loops.answers(asked) == right


def test_a_request_is_cancelled_wherever_it_is(loops: Loops, asked: list[Request], right: list[list[int]]) -> None:
    """Before its epoch has begun, and while it runs; others are answered."""
    loops.ask(0, 1, *asked[:4])
    loops.step(3)
    loops.ask(0, 3, asked[4])
    loops.step()
    loops.tell(0, Cancel("q4", 3, (0,)), Cancel("q1", 1, (0,)))
    others = [asked[0], *asked[2:4]]
    loops.step()
    known = len([report for report in loops.heard(Told) if report.request == "q1"])
    loops.drop(3)
    loops.step(STEPS // 20)
    told = [report for report in loops.heard(Told) if report.request != "q1"]
    assert {report.request for report in told} == {request.name for request in others}
    assert sum(len(report.tokens) for report in told) == sum(request.new for request in others)
    assert len([report for report in loops.heard(Told) if report.request == "q1"]) == known < asked[1].new


def test_a_request_that_is_cancelled_on_its_way_ends_where_it_arrives(loops: Loops, asked: list[Request]) -> None:
    """The new first stage hears of that before it has taken up its epoch, and of the request from the old one."""
    asked = [replace(request, new=200) for request in asked]
    loops.ask(1, 2, *asked)
    loops.step(3)
    loops.tell_all(Prepare(3, PAIR))
    loops.both(protocol.Prepared, 3)
    loops.tell_all(Commit(3))
    loops.tell(0, Cancel("q1", 3, (0, 1)))
    loops.both(protocol.Exchanged, 3)
    leader = loops.loops[0]._state.leader
    assert leader is not None
    assert {*leader.requests.by_name} == {request.name for request in asked} - {"q1"}
    loops.tell(0, *(Cancel(request.name, 3, (0, 1)) for request in asked))
    loops.step(20)
    assert not leader.requests.by_name
    stage = loops.loops[1]._state.stage
    assert stage is not None
    assert stage.follower is not None
    assert not stage.follower.held


def test_an_epoch_that_a_peer_has_given_up_before_it_is_heard_of_is_given_up(loops: Loops) -> None:
    """The link to it is lost as soon as it is made."""
    there, back = Pumped.pair()
    assert isinstance(there, Pumped)
    there.error, there.state = LinkError(3, 1, "it was given up while it was formed"), LinkState.LOST  # type: ignore[misc]
    loops.links[3, 0], loops.links[3, 1] = there, back  # type: ignore[assignment]
    loops.tell(0, Prepare(3, PAIR))
    loops.until(protocol.Suspected(0.0, 3, 0, 1))
    assert (loops.loops[0]._change.pending, loops.loops[0]._state.epoch) == (None, 1)


def test_the_load_is_told_with_a_count_that_grows(loops: Loops, asked: list[Request]) -> None:
    loops.ask(0, 1, *asked)
    loops.step(8)
    loads = [message for message in loops.desks[0].heard if isinstance(message, protocol.Load)]
    assert [load.progress for load in loads] == sorted({load.progress for load in loads})
    assert max(load.used for load in loads) > loads[0].used
    assert max(load.pending for load in loads) > 0
    assert {load.epoch for load in loads} == {1}


def test_tokens_of_one_step_are_told_at_once(loops: Loops, asked: list[Request], right: list[list[int]]) -> None:
    """Each message through the supervisor's store costs it ten times what a token more in one does."""
    loops.ask(0, 1, *asked)
    assert loops.answers(asked) == right
    told = [posted for posted in loops.desks[0].posted if isinstance(posted[0], Told)]
    assert len({report.before for report in loops.heard(Told)}) == asked[0].new
    assert any(len(posted) == len(asked) for posted in told)
    assert len(told) < sum(request.new for request in asked) / 2
