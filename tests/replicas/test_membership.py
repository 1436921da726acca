"""Joining over a store, mail and the wakeup, with both sides in one process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ballonet.hooks.replicas.admission_protocol import JOIN_QUEUE
from ballonet.hooks.replicas.errors import OtherModel, SecretRefused, SupervisorLost
from ballonet.hooks.replicas.fingerprint import Fingerprint
from ballonet.hooks.replicas.listener import Listener
from ballonet.hooks.replicas.mailbox import SUPERVISOR, Mail, Mailbox
from ballonet.hooks.replicas.membership import JoinListener, join
from ballonet.hooks.replicas.secret import proof
from ballonet.hooks.replicas.store import Store
from ballonet.hooks.replicas.wakeup import Wakeup

LONG = 120.0  # s, until a test is given up
SERVED = Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0")
SECRET = "a secret"


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.host(timeout=LONG)


@pytest.fixture
def reception(store: Store) -> Iterator[JoinListener]:
    found = JoinListener(store, SECRET, SERVED, Wakeup(), time.monotonic, LONG)
    yield found
    found.close()


def test_who_has_joined_is_told_of_and_has_its_number(store: Store, reception: JoinListener) -> None:
    for number in range(2):
        assert join(store, SECRET, SERVED, LONG) == number
        admitted = reception._wakeup.wait(reception.take, LONG)
        assert admitted is not None
        assert (admitted.member, admitted.fingerprint) == (number, SERVED)
    assert store.keys() == 0


@pytest.mark.parametrize(
    ("secret", "fingerprint", "error", "why"),
    [
        ("another", SERVED, SecretRefused, "has another secret"),
        (None, SERVED, SecretRefused, "none was given"),
        (SECRET, replace(SERVED, dtype="float16 x 291"), OtherModel, "dtype is float16"),
    ],
)
def test_who_has_another_secret_or_model_is_refused(
    store: Store,
    reception: JoinListener,
    secret: str | None,
    fingerprint: Fingerprint,
    error: type[Exception],
    why: str,
) -> None:
    with pytest.raises(error, match=why):
        join(store, secret, fingerprint, LONG)
    assert reception.take() is None
    assert store.keys() == 0


def test_what_comes_to_the_door_and_is_no_message_does_no_harm(store: Store, reception: JoinListener) -> None:
    for text in ("nothing", "{}", '{"hello": "x", "proof": "y"}', "[" * 100_000):
        store.push(JOIN_QUEUE, text)
    with pytest.raises(SecretRefused):
        join(store, "another", SERVED, LONG)
    assert join(store, SECRET, SERVED, LONG) == 0
    assert reception.protocol.ignored == 4


def test_a_closed_reception_admits_nobody_and_ends_its_thread(store: Store) -> None:
    before = threading.active_count()
    reception = JoinListener(store, SECRET, SERVED, Wakeup(), time.monotonic, LONG)
    reception.close()
    reception.close()
    assert threading.active_count() == before


@pytest.fixture
def boxes(store: Store) -> Iterator[list[Mailbox]]:
    """The boxes of the supervisor, and of members 0 and 1, each over a connection of its own."""
    before = store.keys()
    found = [Mailbox(store.clone(), me, SECRET, Wakeup()) for me in (SUPERVISOR, 0, 1)]
    yield found
    for box in found:
        box.close()
    assert store.keys() == before


def wait(box: Mailbox) -> Mail:
    found = box._wakeup.wait(box.take, LONG)
    assert found is not None
    return found


def test_mail_is_in_order_read_once_and_leaves_nothing(boxes: list[Mailbox]) -> None:
    boss, *members = boxes
    for number in range(50):
        for box in members:
            if number % 2 == 0:
                box.post(SUPERVISOR, f"{number}", f"{number + 1}")
            boss.post(box.me, f"to {box.me}: {number}")
    got: dict[int, list[str]] = {box.me: [] for box in members}
    for _ in range(100):
        mail = wait(boss)
        got[mail.sender].append(mail.text)
    assert got == {box.me: [f"{number}" for number in range(50)] for box in members}
    for box in members:
        assert [wait(box) for _ in range(50)] == [Mail(SUPERVISOR, f"to {box.me}: {n}") for n in range(50)]
    assert [box.take() for box in boxes] == [None] * 3
    assert [box.refused for box in boxes] == [0] * 3


def test_mail_that_is_forged_or_sent_again_is_refused(store: Store, boxes: list[Mailbox]) -> None:
    boss, one, _ = boxes
    one.post(SUPERVISOR, "first")
    assert wait(boss) == Mail(0, "first")
    again = json.dumps([0, 1, ["first"]])
    to_another = json.dumps([0, 2, ["for member 1"]])
    for text in (
        "nothing",
        "0" * 64 + json.dumps([0, 999, ["forged"]]),
        proof(SECRET, str(SUPERVISOR), again) + again,
        proof(SECRET, "1", to_another) + to_another,
    ):
        store.push("mail/supervisor", text)
    store.keys()  # has an answer: what was pushed before, which has none, is there
    one.post(SUPERVISOR, "after")
    assert wait(boss) == Mail(0, "after")
    assert boss.refused == 4


def test_who_waits_for_mail_hears_that_the_supervisor_is_gone() -> None:
    hosting = [Store.host(timeout=LONG)]
    box = Mailbox(Store.connect("127.0.0.1", hosting[0].port, timeout=LONG), 0, SECRET, Wakeup())
    gone = threading.Timer(0.1, hosting.clear)
    gone.start()
    begun = time.monotonic()
    with pytest.raises(SupervisorLost, match="its supervisor has ended"):
        wait(box)
    assert time.monotonic() - begun < LONG / 2
    assert box.has()
    gone.join()
    box.close()


def test_who_goes_does_not_wait_for_a_machine_that_is_gone_without_a_word() -> None:
    """The waiting thread notices nothing: its connection is not closed."""

    class Silent:
        timeout = 0.05

        def __init__(self) -> None:
            self.over = threading.Event()

        def clone(self, timeout: float) -> Silent:
            return self

        def pop(self, queue: str, wait: bool) -> str:
            self.over.wait()
            return ""

        def push(self, queue: str, value: str) -> None:
            """Drops the value."""

    store: Any = Silent()
    listener = Listener(store, "mail/0", print, print)
    going = threading.Thread(target=listener.close, daemon=True)
    going.start()
    going.join(LONG)
    assert not going.is_alive()
    store.over.set()
    listener._thread.join()


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
