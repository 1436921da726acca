"""Messages between replicas and their supervisor, both ends in one process: joining, order, and their ends."""

from __future__ import annotations

import copy
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.replicas.channel import InOrder, ToSupervisor, Wakeup
from ballonet.hooks.replicas.child_processes import PipeToSupervisor, ReplicaPipes
from ballonet.hooks.replicas.errors import OtherModel, SupervisorLost
from ballonet.hooks.replicas.messages import (
    End,
    Fingerprint,
    Join,
    Message,
    Start,
    StartTimeline,
    SupervisorRestarted,
    Told,
    Welcome,
    encoded,
    fingerprint_of,
)
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.offload.policy.replicas import protocol

from ..pool import take_out
from .stages import chosen

LONG = 120.0  # s, until a test is given up
SERVED = Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0")
LINKS = 29400


class Office:
    """A supervisor's pipes."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.replicas = ReplicaPipes("here", LINKS, self.wakeup)
        self._left: list[Any] = []

    def connect(self) -> PipeToSupervisor:
        end = PipeToSupervisor(self.replicas.open(), Wakeup(), LONG, print)
        end.serving.set()
        return end

    def joined(self, fingerprint: Fingerprint = SERVED) -> tuple[int, PipeToSupervisor]:
        end = self.connect()
        return end.join(fingerprint).member, end

    def take(self) -> tuple[int, Message]:
        message = self.wakeup.wait(self.replicas.take, LONG)
        assert message is not None
        return message

    def leave(self) -> None:
        """What the end of the supervisor's process does, once all is sent."""
        for pipe in [pipe for pipe in self.replicas._open if pipe not in self._left and not pipe.ended.is_set()]:
            self._left.append(pipe)  # its writer ends, and takes nothing any more
            pipe.outgoing.put(None)
            eventually(lambda pipe=pipe: pipe.outgoing.empty() or pipe.ended.is_set())  # type: ignore[misc]
            with suppress(OSError), socket.socket(fileno=os.dup(pipe.connection.fileno())) as ending:  # closed by now
                ending.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def office() -> Iterator[Office]:
    before = {*threading.enumerate()}  # those of a test before may be ending yet
    opened = Office()
    yield opened
    opened.leave()
    eventually(lambda: before.issuperset(threading.enumerate()))


def eventually(true: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"not within {LONG} s"
        time.sleep(0.005)


def taken(end: PipeToSupervisor) -> Message:
    message = end.wakeup.wait(end.take, LONG)
    assert message is not None
    return message


def told(number: int) -> Told:
    return Told("a", 1, number, chosen(number))


def test_replicas_that_join_get_numbers_in_turn_and_the_address_of_the_store(office: Office) -> None:
    for number in range(3):
        end = office.connect()
        welcome = end.join(SERVED)
        assert (welcome.member, welcome.host, welcome.links) == (number, "here", LINKS)
    assert not office.replicas.has()


@pytest.mark.parametrize(
    ("changed", "differences"),
    [
        ({"weights": "ffff"}, ("weights is ffff, not 0a1b",)),
        ({"dtype": "float16 x 291", "weights": "ffff"}, ("dtype is float16 x 291, not bfloat16 x 291",)),
        ({"torch": "2.12.0", "ballonet": "0.2"}, ("ballonet is 0.2, not 0.1", "torch is 2.12.0, not 2.13.0")),
    ],
)
def test_replica_of_another_model_is_told_what_differs(
    office: Office, changed: dict[str, str], differences: tuple[str, ...]
) -> None:
    office.joined()
    end = office.connect()
    with pytest.raises(OtherModel, match="this one differs") as caught:
        end.join(replace(SERVED, **changed))
    assert caught.value.differences == differences
    end.post(told(0))
    assert office.joined()[0] == 1
    assert not office.replicas.has(), "who was refused is not heard"


def test_replica_that_sends_bytes_that_are_no_message_is_dropped(office: Office) -> None:
    for bad in (b"nothing", b"\x91" * 100_000):
        pipe = office.replicas.open()
        pipe.send_bytes(encoded(told(0)))  # before it has joined
        pipe.send_bytes(bad)
        with pytest.raises((OSError, EOFError)):
            pipe.recv_bytes()
        pipe.close()
    assert office.replicas.take() is None


def test_messages_arrive_once_and_in_order_each_way(office: Office) -> None:
    members = dict(office.joined() for _ in range(2))
    for number in range(0, 50, 2):
        for member, end in members.items():
            end.post(told(number), told(number + 1))
            office.replicas.post(member, Start(number, Request("a", (member,), 1)))
    got: dict[int, list[Message]] = {member: [] for member in members}
    for _ in range(100):
        member, message = office.take()
        got[member].append(message)
    assert got == {member: [told(number) for number in range(50)] for member in members}
    for member, end in members.items():
        assert [taken(end) for _ in range(25)] == [
            Start(number, Request("a", (member,), 1)) for number in range(0, 50, 2)
        ]
        assert end.take() is None
    office.replicas.post(7, End())  # nobody has this number


def test_kinds_of_waiting_messages_are_seen_without_taking_them(office: Office) -> None:
    member, end = office.joined()
    office.replicas.post(member, StartTimeline())
    office.replicas.post(member, protocol.Alone(1, member))
    eventually(lambda: end.has_kind((protocol.Alone,)))
    assert not end.has_kind((End,))
    assert [taken(end), taken(end)] == [StartTimeline(), protocol.Alone(1, member)]


def test_supervisor_does_not_wait_for_a_replica_that_reads_nothing(office: Office) -> None:
    pipe = office.replicas.open()
    pipe.send_bytes(encoded(Join(SERVED)))
    pipe.recv_bytes()
    for number in range(200):  # more than a pipe keeps
        office.replicas.post(0, Start(number, Request("a", (1,) * 20_000, 1)))
    assert office.joined()[0] == 1
    pipe.close()


def test_replica_that_joins_again_has_another_number_and_no_message_to_the_old_one(office: Office) -> None:
    member, end = office.joined()
    office.replicas.post(member, protocol.Alone(0, member))
    office.replicas.post(member, protocol.Alone(1, member))
    assert taken(end) == protocol.Alone(0, member)
    again = end.join(SERVED).member
    assert again == member + 1
    office.replicas.post(member, End())
    office.replicas.post(again, StartTimeline())
    assert taken(end) == StartTimeline()
    end.post(told(1))
    assert office.take() == (again, told(1))


def test_replica_hears_that_the_supervisor_is_gone(office: Office) -> None:
    member, end = office.joined()
    office.replicas.post(member, End())
    office.leave()
    assert taken(end) == End(), "what was posted before comes first"
    with pytest.raises(SupervisorLost, match="has ended"):
        taken(end)
    assert end.has()
    with pytest.raises(SupervisorLost):
        end.has_kind((End,))


def post_for_ever(end: PipeToSupervisor) -> None:
    while True:
        end.post(told(1))


def test_replica_that_posts_hears_that_the_supervisor_is_gone(office: Office) -> None:
    _, end = office.joined()
    office.leave()
    with pytest.raises(SupervisorLost):
        post_for_ever(end)


def test_numbered_messages_are_taken_once_and_in_order_whenever_they_come() -> None:
    inbox, got = InOrder(), list[Message]()
    for number in (2, 1, 1, 4, 2, 5, 3, 3, 5):
        got += inbox.take(number, encoded(told(number), told(-number)))
    assert got == [told(sign * number) for number in range(1, 6) for sign in (1, -1)]


def test_replica_that_joins_as_its_supervisor_is_started_again_joins_the_new_one() -> None:
    """The first question is lost with the first supervisor."""
    asked = list[Message]()

    class Restarting(ToSupervisor):
        def post(self, *messages: Message) -> None:
            asked.extend(messages)
            self.arrive([SupervisorRestarted() if len(asked) == 1 else Welcome(3, "there", LINKS)])

        def close(self) -> None:
            """Nothing is open."""

    assert Restarting(Wakeup(), LONG).join(SERVED, [Request("a", (1,), 1)]) == Welcome(3, "there", LINKS)
    assert asked == [Join(SERVED, (Request("a", (1,), 1),))] * 2


def test_a_wait_that_nothing_ends_is_as_long_as_was_asked() -> None:
    begun = time.monotonic()
    assert Wakeup().wait(lambda: None, 0.05) is None
    assert time.monotonic() - begun >= 0.05


def test_a_ring_while_somebody_looks_is_not_missed() -> None:
    wakeup = Wakeup()
    looks: list[int] = []

    def look() -> bool | None:
        looks.append(1)
        wakeup.notify()
        return True if len(looks) == 3 else None

    begun = time.monotonic()
    assert wakeup.wait(look, LONG) is True
    assert time.monotonic() - begun < LONG / 2


def test_a_fingerprint_is_of_the_weights_their_type_and_the_versions() -> None:
    ballonet.install(budget="64MiB")
    try:
        device = devices.require()
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        fingerprint = fingerprint_of(model, device)
        assert (fingerprint.torch, fingerprint.dtype) == (torch.__version__, "float32 x 2")
        assert fingerprint_of(copy.deepcopy(model), device) == fingerprint
        with torch.no_grad():
            model.weight.mul_(1.5)
        assert [difference.split()[0] for difference in fingerprint.differences(fingerprint_of(model, device))] == [
            "weights"
        ]
        assert fingerprint.differences(fingerprint_of(model.half(), device)) == (
            "dtype is float16 x 2, not float32 x 2",
        )
        del model
    finally:
        take_out()
