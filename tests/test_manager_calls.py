"""Whom the manager asks, when, and holding what; and what it knows of the link."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ballonet.offload.manager import memory_manager, overview
from ballonet.offload.manager.device_view import DevicePages, Traffic, sent
from ballonet.offload.manager.memory_manager import MemoryManager, Surroundings
from ballonet.offload.policy.plan import Plan, streaming
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .fake_manager import EQUAL, LINK, FakeDevice, FakeModel, a_manager, keys, trace
from .tuned import Clock

PAGES = DEFAULT.pages

# -- what is asked of whom, and when


def test_while_nothing_happens_nobody_is_asked_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    device, manager, clock, (a, b) = a_manager(100, {}, {"tpot": 0.05})
    for model in (a, b, a, b):
        model.step(manager)
    published, asked = device.published, (a.asked, b.asked)
    monkeypatch.setattr(memory_manager, "decide", None)
    monkeypatch.setattr(overview, "listed", None)
    for _ in range(20):
        clock.now += 0.3
        a.step(manager, length=7, kv=1)
        b.step(manager, batch=1, length=5)
    assert device.published == published
    assert (a.asked, b.asked) == asked


def test_the_list_is_published_when_it_is_another_one() -> None:
    device, manager, clock, (a, b) = a_manager(100, {}, {})
    a.step(manager)
    order = [layer for name, layer in keys(device) if name == "b"]
    assert order == [0, 4, 2, 6, 1, 3, 5] == [layer for name, layer in keys(device) if name == "a"]
    assert keys(device)[0][0] == "b", "it is idle"
    assert keys(device)[-1][0] == "a", "its passes wait for that"
    first = device.published
    a.step(manager, "prefill")
    a.step(manager)
    assert device.published == first
    clock.now += 2 * PAGES.idle
    b.step(manager)
    assert keys(device)[0][0] == "a"
    before = sum(name == "a" for name, _ in keys(device)[:3])
    a.times["prefill"] = 0.01
    manager.changed(a)
    b.step(manager)
    assert sum(name == "a" for name, _ in keys(device)[:3]) < before, "fewer hide behind a prefill now"


def test_layers_that_cannot_be_taken_are_not_in_the_list() -> None:
    device, manager, _, (a, _b) = a_manager(100, {}, {"interval": None})
    a.entries = lambda layer: layer % 4 != 0
    a.step(manager)
    assert keys(device) == [("a", layer) for layer in (2, 6, 1, 3, 5)]
    a.entries = lambda layer: True
    a.step(manager)
    assert keys(device) == [("a", layer) for layer in (2, 6, 1, 3, 5)], "nobody said that there is more"
    manager.changed(a)
    a.step(manager)
    assert keys(device) == [("a", layer) for layer in (0, 4, 2, 6, 1, 3, 5)]
    manager.remove(a)
    assert device.listed == []
    manager.remove(a)
    with pytest.raises(KeyError):
        manager.before(a, Point("decode", 1, 1))


def test_a_model_that_changes_is_not_taken_from() -> None:
    device, manager, _, (a, b) = a_manager(90, {}, {})
    a.step(manager, kv=15)
    assert trace(device) == ["b"]
    with manager.changing(b) as taken:
        b.changes += 1
        assert taken == {0}
        assert {name for name, _ in keys(device)} == {"a"}
        a.step(manager)
        assert {name for name, _ in keys(device)} == {"a"}
        assert not device.want(36), "only what a has"
        b.plan, b.gone = streaming(EQUAL, (0, 4), 1), set()
        b.changes -= 1
    assert keys(device)[0][0] == "b"
    assert ("b", 4) not in keys(device)


def test_a_change_that_fails_is_asked_for_again() -> None:
    _device, manager, _, (a, b) = a_manager(90, {}, {})
    a.step(manager, kv=15)
    point = Point("prefill", 1, 1)
    wanted = manager.before(b, point).plan
    assert wanted == streaming(EQUAL, (0, 4), 1)
    with pytest.raises(MemoryError), manager.changing(b):
        raise MemoryError
    assert manager.before(b, point).plan == wanted
    with manager.changing(b) as taken:
        assert taken == {0}
        b.plan, b.gone = wanted, set()
    assert manager.before(b, point).plan == wanted
    with manager.changing(b) as taken:
        assert taken == set()


def test_a_list_that_is_overtaken_is_not_published() -> None:
    """While entries are made a model may begin to change, on another thread or this one."""
    device, manager, _, (a, b) = a_manager(100, {}, {})
    changing = None

    def entries(layer: int) -> bool:
        nonlocal changing
        if changing is None:
            changing = manager.changing(b)
            changing.__enter__()
            b.changes += 1
        return True

    a.entries = entries
    a.step(manager)
    assert "b" not in {name for name, _ in keys(device)}
    assert changing is not None
    b.changes -= 1
    changing.__exit__(None, None, None)
    assert "b" in {name for name, _ in keys(device)}


def test_models_are_called_without_the_lock() -> None:
    """`entry` and `cover` may wait for whoever waits for the manager."""
    device, manager, _, (a, _b) = a_manager(60, {}, {"interval": None})
    called = []

    def other_thread(*_: object) -> bool:
        thread = threading.Thread(target=manager.link.set_traffic, args=(len(called) * LINK,), daemon=True)
        thread.start()
        thread.join(200)
        called.append(thread.is_alive())
        return True

    a.entries = other_thread
    device.withdraw = other_thread  # type: ignore[method-assign, assignment]
    device.kv = 20
    a.step(manager)
    with manager.changing(a):
        pass
    assert len(called) > 5
    assert not any(called)


def test_threads() -> None:
    """Each model on its own; no list is published that has a layer of one that changes, nor one that is gone."""
    _device, manager, _, them = a_manager(10**6, {}, {}, {}, {})

    def run(model: FakeModel) -> None:
        for n in range(60):
            manager.before(model, Point("decode", 1, 1 + n))
            with manager.changing(model):
                model.changes += 1
                model.plan = Plan(EQUAL) if n % 2 else streaming(EQUAL, (0, 4), 1)
                model.changes -= 1

    with ThreadPoolExecutor(len(them)) as threads:
        for done in [threads.submit(run, model) for model in them]:
            done.result()


def test_models_of_one_name() -> None:
    device, manager, _, (a, b) = a_manager(80, {"name": "Llama", "tpot": 0.06}, {"name": "Llama", "pages": (2,) * 4})
    b.step(manager)
    a.step(manager)
    assert a.step(manager, kv=device.free).plan.pages == EQUAL
    a.step(manager, kv=2)
    assert len(b.gone) == 1, "and not of the other, which has as many layers streaming as it may"
    assert b.step(manager).plan.pages == (2,) * 4


def test_an_slo_needs_the_bandwidth() -> None:
    device, manager, _, (_a,) = a_manager(80, {}, bandwidth=None)
    with pytest.raises(ValueError, match="bandwidth"):
        manager.add(FakeModel(device, "b", tpot=0.1))
    with pytest.raises(ValueError, match="bandwidth"):
        manager.admit(FakeModel(device, "b", tpot=0.1), 40)
    manager.link.bandwidth = LINK
    assert manager.link.bandwidth == LINK
    assert manager.admit(FakeModel(device, "b", tpot=0.1), 40) is None


# -- others on the link


class FakeLink:
    """What NVML would say, once for each time that it is waited for."""

    def __init__(self, device: FakeDevice, clock: Clock) -> None:
        self.device = device
        self.clock = clock
        self.others = 0
        self.own = 0
        self.known = True

    def __call__(self) -> int | None:
        self.clock.now += 0.02
        self.device.copied += self.own // 50
        return self.others + self.own if self.known else None


def test_traffic_is_what_others_send() -> None:
    """Real link use less our own bytes, the middle of the last looks."""
    device, clock = FakeDevice(10), Clock()
    told: list[float] = []
    nvml = FakeLink(device, clock)
    watcher = Traffic(nvml, lambda: sent(device), told.append, clock)
    assert sent(device) == 0
    nvml.own = 10**6
    assert watcher.look()
    assert told == [0]
    nvml.others = 3 * 10**5
    assert watcher.look()
    assert watcher.look()
    assert told[-1] == pytest.approx(3 * 10**5)
    nvml.others = 9 * 10**5
    assert watcher.look()
    assert told[-1] == pytest.approx(3 * 10**5), "one burst is none"
    nvml.known = False
    assert not watcher.look()
    assert len(told) == 4


def test_the_link_is_watched_while_something_streams() -> None:
    device, clock = FakeDevice(60), Clock()
    looked, released = threading.Event(), threading.Event()

    def received() -> int:
        looked.set()
        released.wait(200)
        return LINK

    manager = MemoryManager(device, Surroundings(bandwidth=LINK, received=received, clock=clock))
    a = FakeModel(device, "a", tpot=0.05)
    manager.add(a)
    assert not any(thread.name == "ballonet-link-traffic" for thread in threading.enumerate())
    a.step(manager)
    assert a.plan.streamed
    (thread,) = [running for running in threading.enumerate() if running.name == "ballonet-link-traffic"]
    assert thread.daemon
    assert looked.wait(200)
    manager.remove(a)
    released.set()
    thread.join(200)
    assert not thread.is_alive()


def test_traffic_changes_what_streams() -> None:
    """Select-N, coordinator: with less of the link less streams, as far as there are pages."""
    device, manager, _, (a,) = a_manager(60, {"tpot": 0.042})
    assert len(a.step(manager).plan.streamed) == 8
    manager.link.set_traffic(LINK // 2 - 1)
    assert 1 <= len(a.step(manager).plan.streamed) < 8
    asked = a.asked
    manager.link.set_traffic(LINK // 2 - 2)
    a.step(manager)
    assert a.asked == asked, "too little to be told apart"
    manager.link.set_traffic(0)
    assert len(a.step(manager).plan.streamed) == 8
    device.kv = device.free
    manager.link.set_traffic(LINK // 2)
    missed = a.step(manager)
    assert len(missed.plan.streamed) == 8, "there are none"
    assert missed.refusal is not None
    assert missed.refusal.pages == 30, "or one layer of two"
    new = FakeModel(device, "new", tpot=0.042)
    manager.remove(a)
    assert manager.admit(new, 10) is not None
    manager.link.set_traffic(0)
    assert manager.admit(new, 10) is None


def idle_weights(manager: MemoryManager) -> set[int]:
    """The numbers of the models whose layers are those of an idle one."""
    candidates = manager.reclaim.candidates()
    return {candidate.client for candidate in candidates if candidate.source is PageSource.IDLE_WEIGHTS}


def test_whoever_schedules_requests_says_who_is_idle() -> None:
    _, manager, clock, (a, b) = a_manager(100, {}, {})
    a.wanted = b.wanted = math.inf
    for model in (a, b):
        model.step(manager)
    clock.now += 5 * PAGES.idle
    a.step(manager)
    assert not idle_weights(manager), "its turn comes again, however late"
    b.wanted = clock.now
    a.step(manager)
    assert idle_weights(manager) == {2}, "at once"
    clock.now += 0.1
    b.step(manager)
    a.step(manager)
    assert not idle_weights(manager), "it was used by itself"
    clock.now += 2 * PAGES.idle
    a.step(manager)
    assert idle_weights(manager) == {2}, "and is idle by time then"
    b.wanted = math.inf
    a.step(manager)
    assert not idle_weights(manager), "before its first step"


def test_a_model_with_requests_again_is_as_one_that_wakes() -> None:
    device, manager, clock, (a, b) = a_manager(90, {}, {})
    a.wanted = b.wanted = math.inf
    for model in (a, b, a):
        model.step(manager)
    b.wanted = clock.now
    a.step(manager, kv=35)
    assert trace(device)[:2] == ["b"] * 2, "who is idle first"
    assert manager._known.clients.get(b).usual is None
    b.wanted = math.inf
    clock.now += 3.0
    manager.reclaim.candidates()
    b.step(manager)
    assert manager._known.clients.get(b).usual == 3.0, "it has been idle for so long"


def test_pages_are_waited_for_by_the_clock_of_waits() -> None:
    clock = Clock(step=1.0)  # a second passes at each look, and none otherwise
    pages = DevicePages(FakeDevice(10), replace(PAGES, look=1e-3), clock)
    assert not pages.wait(2.5)
    assert clock.now == 4.0
    clock.step, over = 0.0, threading.Event()

    def gives() -> None:
        while not over.wait(1e-3):  # it may be between two looks
            pages.given()

    given = threading.Thread(target=gives)
    given.start()
    assert pages.wait(1e-6), "which a loaded machine would have passed"
    over.set()
    given.join()
