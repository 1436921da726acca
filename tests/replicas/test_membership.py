"""Joining over a store, mail and the bell, with both sides in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from ballonet.hooks.replicas.bell import Bell
from ballonet.hooks.replicas.epoch import Fence
from ballonet.hooks.replicas.errors import SecretRefused, SupervisorLost
from ballonet.hooks.replicas.fingerprint import Fingerprint
from ballonet.hooks.replicas.liveness import Beat, Heart, end_beats, read_beats
from ballonet.hooks.replicas.mailbox import STALE, SUPERVISOR, Mailbox
from ballonet.hooks.replicas.membership import Reception, join
from ballonet.hooks.replicas.store import Store

from ..tuned import Clock

LONG = 120.0  # s, until a test is given up
SERVED = Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0")
SECRET = "a secret"


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.host(timeout=LONG)


@pytest.fixture
def reception(store: Store) -> Iterator[Reception]:
    found = Reception(store, SECRET, SERVED, Bell(), time.monotonic, LONG)
    yield found
    found.close()


def test_who_has_joined_is_watched_before_it_beats(store: Store, reception: Reception) -> None:
    """So who dies at once is found dead, and does not hold up who reads the beats of all."""
    member = join(store, SECRET, SERVED, LONG)
    assert read_beats(store, [member]) == {member: Beat(0)}
    admitted = reception._bell.wait(reception.take, LONG)
    assert admitted is not None
    assert admitted.member == member
    clock = Clock()
    heart = Heart(store, member, clock)
    for now in (1.0, 1.5, 4.0):
        clock.now = now
        heart.beat(expected=2.5)
    assert read_beats(store, [member]) == {member: Beat(3, longest=2.5, expected=2.5)}
    store.set(f"beat/{member}", "no beat")
    assert read_beats(store, [member]) == {}
    end_beats(store, member)
    assert store.keys() == 0


def test_what_comes_to_the_door_and_is_no_message_does_no_harm(store: Store, reception: Reception) -> None:
    for text in ("nothing", "{}", '{"hello": "x", "proof": "y"}'):
        store.push("door", text)
    with pytest.raises(SecretRefused):
        join(store, "another", SERVED, LONG)
    end_beats(store, join(store, SECRET, SERVED, LONG))
    assert reception.door.ignored == 3


def test_a_closed_reception_admits_nobody_and_ends_its_thread(store: Store) -> None:
    before = threading.active_count()
    reception = Reception(store, SECRET, SERVED, Bell(), time.monotonic, LONG)
    reception.close()
    reception.close()
    assert threading.active_count() == before


def test_mail_of_an_epoch_that_is_over_is_dropped_and_who_is_behind_is_told(store: Store) -> None:
    fences = Fence(1), Fence(1), Fence(1)
    boss, one, late = boxes = [
        Mailbox(store, me, SECRET, Bell(), fence) for me, fence in zip((SUPERVISOR, 0, 1), fences, strict=True)
    ]
    for fence in fences[:2]:
        fence.advance(2)
    late.post(SUPERVISOR, "done", 1)
    late.post(0, "done", 1)  # a member drops it and tells nobody
    late.post(0, "news", 2)
    one.post(SUPERVISOR, "done", 2)
    found = boss.wait(LONG)
    assert found is not None
    assert (found.sender, found.kind) == (0, "done")
    told = late.wait(LONG)
    assert told is not None
    assert (told.kind, told.epoch, told.body) == (STALE, 2, {"had": 1})
    news = one.wait(LONG)
    assert news is not None
    assert news.kind == "news"
    one.post(SUPERVISOR, "done", 1)  # told though it has the new epoch meanwhile, which it drops
    one.post(SUPERVISOR, "end", 2)
    end = boss.wait(LONG)
    assert end is not None
    assert end.kind == "end"
    fences[1].advance(3)
    boss.post(0, "after", 3)
    after = one.wait(LONG)
    assert after is not None
    assert after.kind == "after"
    assert [box.refused for box in boxes] == [0, 0, 0]
    for box in boxes:
        box.close()
    assert store.keys() == 0


def test_who_waits_for_mail_hears_that_the_supervisor_is_gone() -> None:
    hosting = [Store.host(timeout=LONG)]
    box = Mailbox(Store.connect("127.0.0.1", hosting[0].port, timeout=LONG), 0, SECRET, Bell(), Fence())
    gone = threading.Timer(0.1, hosting.clear)
    gone.start()
    begun = time.monotonic()
    with pytest.raises(SupervisorLost, match="its supervisor has ended"):
        box.wait(LONG)
    assert time.monotonic() - begun < LONG / 2
    assert box.has()
    gone.join()
    box.close()


def test_a_wait_that_nothing_ends_is_as_long_as_was_asked() -> None:
    begun = time.monotonic()
    assert Bell().wait(lambda: None, 0.05) is None
    assert time.monotonic() - begun >= 0.05


def test_a_ring_while_somebody_looks_is_not_missed() -> None:
    bell = Bell()
    looks: list[int] = []

    def look() -> bool | None:
        looks.append(1)
        bell.ring()
        return True if len(looks) == 3 else None

    begun = time.monotonic()
    assert bell.wait(look, LONG) is True
    assert time.monotonic() - begun < LONG / 2
