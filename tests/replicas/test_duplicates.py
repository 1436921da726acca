"""Level 7: no page by itself, but a wish to the controller of replicas, which reports it as demand for a while."""

from __future__ import annotations

import gc
import threading

import pytest

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.device import managers
from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.hooks.replicas.layer_moves import ReplicaSetup
from ballonet.hooks.replicas.link import Link
from ballonet.hooks.replicas.messages import End
from ballonet.hooks.replicas.replica import Replica
from ballonet.hooks.replicas.replica_model import GroupSettings, ReplicaModel
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.manager.overview import Duplicates
from ballonet.offload.policy.reclaim_order import LISTED, PageSource
from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.tuning import ReplicaTuning
from ballonet.testing.sources import sources

from ..fake_manager import EQUAL, FakeCache, FakeModel, a_manager
from ..models import build
from .stages import BLOCK, CHUNK, Desk, install


def test_the_core_never_takes_duplicates() -> None:
    assert PageSource.HIDDEN_WEIGHTS < PageSource.DUPLICATES < PageSource.STALLING_WEIGHTS
    assert (PageSource.DUPLICATES, PageSource.DUPLICATES.label) == (7, "duplicates")
    assert PageSource.DUPLICATES not in LISTED
    _, manager, _, (a,) = a_manager(200, {})
    a.step(manager)
    assert {candidate.source for candidate in manager.reclaim.candidates()}.isdisjoint({PageSource.DUPLICATES})


def test_the_source_posts_a_wish_and_frees_nothing() -> None:
    device, manager, _, _ = a_manager(200, {})
    (source,) = [source for source in sources(manager, device, spill=False) if source.source is PageSource.DUPLICATES]
    assert (source.would_free(), source.reclaim(5), source.restore(5)) == (0, 0, 0), "nobody has duplicates"
    wishes: list[int] = []
    withdraw = manager.duplicates.register(wishes.append, lambda: 30)
    free = device.free
    assert (source.would_free(), source.would_cost(), source.reclaim(5), source.restore(5)) == (30, (0.0, 0.0), 0, 0)
    assert (wishes, device.free) == ([5], free), "and what was lacking before anyone was there is no wish"
    withdraw()
    withdraw()
    assert source.reclaim(7) == 0
    assert wishes == [5]


@pytest.mark.parametrize(
    ("beyond", "source"), [(False, PageSource.HIDDEN_WEIGHTS), (True, PageSource.STALLING_WEIGHTS)]
)
def test_a_wish_is_posted_once_what_passes_wait_for_was_taken(beyond: bool, source: PageSource) -> None:
    """The core takes layers whose copies hide without a wish; once it takes what costs time, that is wished for at the
    next iteration, and once."""
    device, manager, _, (a,) = a_manager(200, {})
    wishes: list[int] = []
    manager.duplicates.register(wishes.append, lambda: 0)
    a.step(manager)
    device.kv = device.free
    layers = 2 + beyond
    for _ in range(layers):
        assert device.want(1, a)
        device.kv += device.free
    taken = [manager._known.list.named(key).source for key in (_key(manager, a, layer) for _, layer in device.trace)]
    assert len(taken) == layers
    assert taken[-1] == source.label
    assert wishes == []
    a.step(manager)
    assert wishes == ([EQUAL[0]] if beyond else [])
    a.step(manager)
    assert len(wishes) == beyond


def _key(manager: object, model: FakeModel, layer: int) -> int:
    return int(manager._known.clients.of_model(model).key(layer))  # type: ignore[attr-defined]


def test_wish_comes_before_what_passes_wait_for() -> None:
    device, manager, _, (a,) = a_manager(200, {})
    cache = FakeCache(device, manager, manager.clock)
    cache.step(4)
    a.step(manager)
    seen: list[tuple[int, int]] = []
    manager.duplicates.register(lambda pages: seen.append((pages, len(device.taken_now))), lambda: 0)
    device.taken_now = []
    device.take = lambda keys, pages=None: device.taken_now.append(keys) or 5  # type: ignore[method-assign]
    manager.sources.make_room(10)
    assert (seen, device.taken_now) == ([], []), "it was not to go so far"
    manager.sources.make_room(20, running=True)
    assert seen == [(20 - 5 * 2, 2)], "after the layers that hide"
    assert len(device.taken_now) == 4
    manager.sources.make_room(10**6)
    assert len(seen) == 1
    manager.sources.make_room(10**6, running=True)
    assert len(seen) == 2


def test_a_wish_is_told_without_a_lock() -> None:
    """Whoever is told may ask the manager, and register others."""
    _, manager, _, _ = a_manager(200, {})
    told: list[bool] = []

    def wanted(pages: int) -> None:
        told.append(manager._known.lock.acquire(timeout=5))
        manager._known.lock.release()
        manager.duplicates.register(lambda pages: None, lambda: 1)

    manager.duplicates.register(wanted, lambda: 0)
    thread = threading.Thread(target=manager.duplicates.request_drop, args=(3,))
    thread.start()
    thread.join(60)
    assert told == [True]
    assert manager.duplicates.pages == 1


def test_wishes_add_up_until_they_are_posted() -> None:
    duplicates, wishes = Duplicates(), list[int]()
    duplicates.note_shortage(7)
    duplicates.register(wishes.append, lambda: 0)
    for pages in (3, 0, -1, 4):
        duplicates.note_shortage(pages)
    assert (duplicates._lacking, wishes) == (7, [])
    duplicates.post()
    duplicates.post()
    assert (duplicates._lacking, wishes) == (0, [7])


def test_pages_that_an_operator_could_not_have_are_wished_for() -> None:
    """At the next look of anyone, once, and only what was refused since somebody could drop anything."""
    _, manager, _, (a,) = a_manager(200, {})

    def refuse(pages: int) -> None:
        manager.events.decided(PageSource.REFUSE.label, "reclaim", pages)
        manager._known.list.void()  # so that it is looked at
        a.step(manager)

    wishes: list[int] = []
    refuse(3)
    manager.duplicates.register(wishes.append, lambda: 0)
    refuse(5)
    assert wishes == []
    refuse(7)
    refuse(0)
    a.step(manager)
    assert wishes == [7]


# In a live replica


pytestmark = pytest.mark.usefixtures("nothing_is_left")
LAYERS = 4


def pending(replica: Replica, supervisor: Desk, now: list[float]) -> int:
    """Returns the pending pages of the next load."""
    now[0] += ReplicaTuning().beat
    replica.step()
    return [message.pending for message in supervisor.heard if isinstance(message, protocol.Load)][-1]


def test_pages_that_the_ladder_lacks_are_pending_for_a_while() -> None:
    install()
    model, supervisor, now = build("llama", num_hidden_layers=LAYERS), Desk(), [0.0]

    def no_link(epoch: int, peer: int) -> Link:
        raise AssertionError("it is alone")

    with ballonet.manage(model) as handle, Splice(model) as splice:
        splice.prove()
        member = ReplicaModel("one", model, splice, GroupSettings.of(model, CHUNK, page_size=BLOCK))
        duplicates = managers.of(devices.require()).duplicates
        setup = ReplicaSetup(0, member, LAYERS, HeldLayers(handle), supervisor, no_link, lambda: now[0])
        replica = Replica(setup, Wakeup())
        assert duplicates.known

        supervisor.said.append(protocol.Alone(1, 0))
        replica.step()
        assert pending(replica, supervisor, now) == 0
        duplicates.request_drop(7)
        assert pending(replica, supervisor, now) == 7
        duplicates.request_drop(2)
        assert pending(replica, supervisor, now) == 9, "both at once"
        now[0] += 10 * ReplicaTuning().period
        assert pending(replica, supervisor, now) == 0
        supervisor.said.append(End())
        replica.run()
        assert not duplicates.known, "nobody is told any more"
        del replica, setup, member
        gc.collect()
