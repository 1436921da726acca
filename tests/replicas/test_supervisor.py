"""The supervisor between clients and replicas, which are played here: what each is told; and its ledger, which delivers
each token once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.client_requests import RepeatedOtherwise, RequestLedger
from ballonet.hooks.replicas.messages import (
    End,
    Fingerprint,
    Hello,
    Join,
    JoinRefusal,
    Line,
    Message,
    Start,
    Told,
    Welcome,
    decoded,
    encoded,
)
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.supervisor import Supervisor, SupervisorPorts
from ballonet.hooks.sampling.settings import ChosenToken, Sampling
from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.drops import Pull
from ballonet.offload.policy.replicas.groups import Group, Span
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

from .stages import chosen

COST = ChunkCost(1e-9, 1e-5, 1e-3)
LAYERS = (10, 10, 10, 10)


def hello(rank: int, page: int = 4096) -> Hello:
    return Hello(1000, "here", 100, LAYERS, 64, page, COST, rank)


class Played:
    """The replicas, and the processes of those on this machine."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.started: list[tuple[int, ChunkCost | None]] = []
        self.killed: list[int] = []
        self._said: deque[tuple[int, Message]] = deque()
        self._gone: list[tuple[int, str]] = []
        self._told: list[tuple[int, Message]] = []

    def says(self, member: int, message: Message) -> None:
        self._said.append((member, message))
        self.wakeup.notify()

    def ends(self, rank: int) -> None:
        self._gone.append((rank, "SIGKILL"))
        self.wakeup.notify()

    def hears(self, kind: type[Any], count: int = 1) -> list[Any]:
        """What replicas were told of a kind, with their numbers, once there are so many."""
        wait(lambda: len([message for _, message in self._told if isinstance(message, kind)]) >= count)
        return [(member, message) for member, message in self._told if isinstance(message, kind)]

    # -- for the supervisor

    def take(self) -> tuple[int, Message] | None:
        return self._said.popleft() if self._said else None

    def has(self) -> bool:
        return bool(self._said)

    def post(self, member: int, message: Message) -> None:
        self._told.append((member, message))

    def start(self, rank: int) -> None:
        self.started.append((rank, self.cost))

    def ended(self) -> list[tuple[int, str]]:
        gone, self._gone = self._gone, []
        return gone

    def end(self, rank: int, for_good: bool = False) -> None:
        if not for_good:
            self.killed.append(rank)


class Scene:
    def __init__(self) -> None:
        self.replicas = Played()
        self.told: list[tuple[Request, str | None]] = []
        self.now = 0.0
        ports = SupervisorPorts(
            self.replicas,
            self.replicas,
            self.replicas.wakeup,
            lambda request, error: self.told.append((request, error)),
            lambda line: None,
            lambda: self.now,
        )
        self.supervisor = Supervisor(ports, 2)
        self.supervisor.start()

    def begins(self) -> Start:
        """Two replicas are there, and one of them has the request."""
        self.replicas.says(0, hello(0))
        self.replicas.says(1, hello(1))
        self.replicas.hears(protocol.Alone, 2)
        assert self.supervisor.submit(Request("a", (1, 2), 3)) is None
        [(self.member, start)] = self.replicas.hears(Start)
        assert isinstance(start, Start)
        return start


def wait(until: Callable[[], object]) -> None:
    """Returns once that is so. How long that takes is not judged, but a test that would wait for ever fails."""
    last = time.monotonic() + 600
    while not until():
        assert time.monotonic() < last, "what is waited for does not come"
        time.sleep(0.001)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.supervisor.close()


def test_a_request_has_its_tokens(scene: Scene) -> None:
    start = scene.begins()
    for before in range(3):
        scene.replicas.says(scene.member, Told("a", start.request.assignment, before, chosen(7 + before)))
    wait(lambda: len(scene.told) == 3)
    assert [(request.delivered, request.over, error) for request, error in scene.told] == [
        (chosen(7), False, None),
        (chosen(7, 8), False, None),
        (chosen(7, 8, 9), True, None),
    ]
    assert (scene.supervisor.waiting, scene.supervisor.state().requests) == (0, 0)


def test_requests_of_a_lost_replica_are_computed_again_by_another(scene: Scene) -> None:
    start = scene.begins()
    scene.replicas.says(scene.member, Told("a", start.request.assignment, 0, chosen(7)))
    wait(lambda: scene.told)
    scene.replicas.ends(scene.member)
    (_, _), (member, again) = scene.replicas.hears(Start, 2)
    assert (member, again.request.assignment, again.request.delivered) == (
        1 - scene.member,
        start.request.assignment + 1,
        chosen(7),
    )
    scene.replicas.says(scene.member, Told("a", start.request.assignment, 1, chosen(6)))  # on its way when it ended
    scene.replicas.says(member, Told("a", again.request.assignment, 1, chosen(8)))
    wait(lambda: len(scene.told) == 2)
    assert scene.told[-1][0].delivered == chosen(7, 8)
    assert scene.supervisor.state().recomputed == 1


def test_a_lost_replica_is_replaced_with_the_costs_that_are_known(scene: Scene) -> None:
    scene.begins()
    scene.replicas.ends(scene.member)
    wait(lambda: len(scene.replicas.started) == 3)
    assert scene.replicas.started == [(0, None), (1, None), (scene.member, COST)]
    scene.replicas.says(2, hello(scene.member))
    assert [member for member, _ in scene.replicas.hears(protocol.Alone, 3)] == [0, 1, 2]
    assert scene.supervisor.state().replaced == 1
    scene.replicas.ends(1 - scene.member)
    wait(lambda: len(scene.replicas.started) == 4)
    assert scene.replicas.hears(Start, 3)[-1][0] == 2  # what had gone to the other one


def test_replica_that_joins_once_its_process_has_ended_is_told_to_end(scene: Scene) -> None:
    """Messages from before the process ended are taken after its end is noticed."""
    scene.begins()
    scene.replicas.ends(0)
    wait(lambda: len(scene.replicas.started) == 3)
    scene.replicas.says(2, hello(7))
    scene.replicas.says(3, hello(1))
    assert [member for member, _ in scene.replicas.hears(End, 2)] == [2, 3]
    assert sorted(scene.supervisor.state().spans) == [1]


def test_requests_wait_while_the_last_replica_is_replaced(scene: Scene) -> None:
    start = scene.begins()
    scene.replicas.says(scene.member, Told("a", start.request.assignment, 0, chosen(7)))
    wait(lambda: scene.told)
    scene.replicas.ends(0)
    scene.replicas.ends(1)
    wait(lambda: len(scene.replicas.started) == 4)
    assert scene.supervisor.submit(Request("b", (1,), 1)) is None
    scene.replicas.says(2, hello(0))
    started = scene.replicas.hears(Start, 3)
    assert {(member, message.request.name) for member, message in started[-2:]} == {(2, "a"), (2, "b")}
    assert [error for _, error in scene.told] == [None]


def test_where_no_replica_is_left_clients_are_told(scene: Scene) -> None:
    """Clients of both ranks are lost, and what is started there instead does not come to join."""
    scene.begins()
    scene.replicas.ends(0)
    scene.replicas.ends(1)
    for count in range(ReplicaTuning().starts):
        wait(lambda count=count: len(scene.replicas.started) == 4 + 2 * count)
        scene.replicas.ends(0)
        scene.replicas.ends(1)
        while len(scene.replicas.started) < 6 + 2 * count and not scene.told:
            scene.now += 1.0  # until both are tried again
            time.sleep(0.01)
    wait(lambda: scene.told)
    assert "no replica is left" in str(scene.told[-1][1])
    assert "no replica is left" in str(scene.supervisor.submit(Request("b", (1,), 1)))
    scene.supervisor._clients.submit(Request("late", (1,), 1))  # who had asked whether it fails before it did
    wait(lambda: "late" in [request.name for request, _ in scene.told])
    assert scene.supervisor.waiting == 0


def test_where_no_replica_has_ever_joined_none_is_started_again() -> None:
    scene = Scene()
    try:
        for rank in (0, 1):
            assert scene.supervisor.failed is None
            scene.replicas.ends(rank)
        scene.supervisor.ready.wait()
        assert "none is left: SIGKILL" in str(scene.supervisor.failed)
        assert len(scene.replicas.started) == 2
    finally:
        scene.supervisor.close()


def test_replica_that_starts_when_the_server_ends_is_ended() -> None:
    scene = Scene()
    scene.replicas.says(0, hello(0))
    scene.replicas.hears(protocol.Alone)
    scene.supervisor.close()
    assert scene.replicas.killed == [1]
    assert [member for member, _ in scene.replicas.hears(End)] == [0]


def test_client_that_asks_just_as_the_server_ends_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.begins()
    ask = scene.supervisor._clients.submit

    def too_late(request: Request) -> None:
        scene.supervisor.close()
        ask(request)

    monkeypatch.setattr(scene.supervisor._clients, "submit", too_late)
    assert scene.supervisor.submit(Request("b", (1,), 1)) is None
    assert [(request.name, error) for request, error in scene.told] == [(n, "the server shuts down") for n in "ab"]
    assert scene.supervisor.waiting == 0


def test_an_answer_that_is_another_one_ends(scene: Scene) -> None:
    start = scene.begins()
    scene.replicas.says(scene.member, Told("a", start.request.assignment, 0, chosen(7)))
    scene.replicas.says(scene.member, Told("a", start.request.assignment, 0, chosen(8)))
    wait(lambda: len(scene.told) == 2)
    assert "with other tokens" in str(scene.told[-1][1])


def test_request_of_a_client_that_goes_away_is_cancelled(scene: Scene) -> None:
    scene.begins()
    scene.supervisor.cancel("a")
    [(member, cancel)] = scene.replicas.hears(protocol.Cancel)
    assert (member, cancel.request) == (scene.member, "a")
    scene.supervisor.cancel("a")
    assert scene.supervisor.submit(Request("a", (1, 2), 3)) is None
    scene.replicas.hears(Start, 2)


def test_a_replica_that_stands_still_is_ended(scene: Scene) -> None:
    scene.begins()
    for member in (0, 1):
        scene.replicas.says(member, protocol.Load(0.0, member, member + 1, 0, 50, 0, 1))
    wait(lambda: not scene.replicas.has())
    while not scene.replicas.killed:
        scene.now += 0.2
        other = 1 - scene.member
        scene.replicas.says(other, protocol.Load(0.0, other, other + 1, 0, 50, 0, int(scene.now * 10)))
        time.sleep(0.15)
    assert scene.replicas.killed == [scene.member]
    assert scene.replicas.hears(End)[0][0] == scene.member
    assert scene.replicas.hears(Start, 2)[1][0] == 1 - scene.member


def test_a_replica_of_other_sizes_is_none(scene: Scene) -> None:
    scene.begins()
    scene.replicas.says(5, hello(5, page=8192))
    assert scene.replicas.hears(End)[0][0] == 5


def test_all_who_wait_are_told_at_the_end(scene: Scene) -> None:
    scene.begins()
    scene.supervisor.close()
    assert [(request.name, error) for request, error in scene.told] == [("a", "the server shuts down")]
    assert {member for member, _ in scene.replicas.hears(End, 2)} == {0, 1}
    assert scene.supervisor.submit(Request("b", (1,), 1)) == "the server shuts down"


# The ledger, and messages


REQUEST = Request("a", (1, 2, 3), 5, Sampling(7, 0.5, 3, 0.9), (9,), chosen(4))
GROUP = Group((2, 0), (Span(0, 3), Span(3, 8)))
MESSAGES: list[Message] = [
    Hello(1, "here", 2, (3, 4), 5, 6, ChunkCost(1e-9, 1e-5, 1e-3, decode=ChunkCost(0.0, 1e-5, 1e-3)), 0),
    Start(3, REQUEST),
    Told("a", 2, 1, (ChosenToken(4, -0.5, ((4, -0.5), (6, -1.0))), ChosenToken(5)), "a reason"),
    Join(Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0"), (REQUEST,)),
    Welcome(3, "here", 29400, ChunkCost(1e-9, 1e-5, 1e-3)),
    Line("loading"),
    JoinRefusal(("torch is 2.12.0, not 2.13.0",)),
    protocol.Prepare(4, (GROUP,), (Pull(2, 3, None), Pull(2, 4, 0))),
    protocol.Commit(4, (("a", 2),)),
    protocol.Discard(4, protocol.Reason.HOST_MEMORY),
    protocol.PrepareFailed(1.5, 4, 2, protocol.Reason.FILE_CHANGED),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    assert decoded(encoded(message, message)) == (message, message)


@pytest.mark.parametrize(
    "packed",
    [b"", b"nothing", encoded(MESSAGES[0])[:-1], msgspec.msgpack.encode([{"type": "Unheard"}]), b"\x91" * 100_000],
)
def test_bytes_that_are_no_message_raise_value_error(packed: bytes) -> None:
    with pytest.raises(ValueError, match="no message of this version"):
        decoded(packed)


def test_a_request_is_there_once() -> None:
    ledger = RequestLedger()
    ledger.accept(REQUEST, 0.0)
    with pytest.raises(ValueError, match="has not ended"):
        ledger.accept(REQUEST, 0.0)
    assert ledger.end("a") is not None
    assert ledger.end("a") is None
    ledger.accept(REQUEST, 0.0)
    assert [len(ledger), "a" in ledger, "b" in ledger] == [1, True, False]


def test_tokens_of_who_is_not_asked_any_more_do_not_count() -> None:
    ledger = RequestLedger()
    ledger.accept(Request("a", (1,), 9), 0.0)
    first, second = (ledger.assign("a").request.assignment for _ in range(2))
    assert ledger.deliver("a", first, 0, chosen(5)) == ()
    assert ledger.deliver("a", second, 0, chosen(5)) == chosen(5)
    assert ledger.deliver("b", second, 0, chosen(5)) == ()


def test_tokens_that_are_computed_again_have_to_be_the_same() -> None:
    ledger = RequestLedger()
    ledger.accept(Request("a", (1,), 9), 0.0)
    assignment = ledger.assign("a").request.assignment
    assert ledger.deliver("a", assignment, 0, chosen(5, 6)) == chosen(5, 6)
    with pytest.raises(RepeatedOtherwise):
        ledger.deliver("a", assignment, 1, chosen(7))
    with pytest.raises(ValueError, match="never came"):
        ledger.deliver("a", assignment, 3, chosen(8))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.tuples(st.integers(0, 19), st.integers(1, 5))))
def test_clients_get_each_token_once(answer: list[int], reports: list[tuple[int, int]]) -> None:
    """Reports of any parts of an answer, again and again: what is new of each is what comes behind the others."""
    ledger = RequestLedger()
    ledger.accept(Request("a", (1,), len(answer) + 1), 0.0)
    got: list[ChosenToken] = []
    for begin, count in reports:
        before = min(begin, len(got))  # none is missing
        got += ledger.deliver(
            "a", ledger.assign("a").request.assignment, before, chosen(*answer[before : before + count])
        )
    assert got == [*chosen(*answer[: len(got)])]
    assert ledger.entry("a").request.delivered == tuple(got)
