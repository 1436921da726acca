"""What is done to its end although an exception comes between any two instructions of Python; locks and the GIL."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install, interrupts
from ballonet.allocator._native import Lease
from ballonet.allocator.interrupts import Finalizer, guarded, if_free
from ballonet.hooks import manage, managed
from ballonet.hooks.device import managers
from ballonet.hooks.forward import forwards, lease
from ballonet.hooks.kv import generation
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.streaming import arrangement, model_residency, streamed
from ballonet.hooks.weights import moving
from ballonet.offload.manager import clients, kv_client, kv_tier, memory_manager, overview, reclaim

from .core import PAGE, UNMAPS, Gate, Other, program
from .faulting import at_each_line
from .models import build, prompts
from .pool import tiny_layers
from .tuned import Tuned

INPUTS = prompts(batch=2, longest=9)
FAREWELLS = (
    interrupts,
    manage,
    managed,
    generation,
    lease,
    forwards,
    memory_manager,
    overview,
    reclaim,
    reclaim,
    clients,
    kv_client,
    kv_tier,
    model_residency,
)


class Ignored:
    """What Python ignores in finalizers, and would print."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[type[BaseException]] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda it: self.kinds.append(it.exc_type))


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> Ignored:
    return Ignored(monkeypatch)


@pytest.fixture
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**22, PAGE):
        yield


class Thing:
    """Something that can be collected."""


def test_farewells_that_nobody_keeps_are_all_said() -> None:
    things, said = [Thing() for _ in range(50)], []

    def say() -> None:
        said.append("finalizer")

    for thing in things:
        Finalizer(thing, say)
    del thing
    things.clear()
    assert len(said) == 50


def test_a_farewell_is_said_once_and_to_its_end(ignored: Ignored) -> None:
    said: list[str] = []

    def stumbles(error: type[BaseException], times: int) -> Callable[[], None]:
        left = [times]

        def step() -> None:
            said.append(error.__name__)
            left[0] -= 1
            if left[0] >= 0:
                raise error

        return step

    watched, thing = {*interrupts._watched}, Thing()
    finalizer = Finalizer(thing, stumbles(KeyboardInterrupt, 40), stumbles(ValueError, 99), lambda: said.append("end"))
    assert finalizer.alive
    del thing
    assert said == ["KeyboardInterrupt"] * 41 + ["ValueError"] * 3 + ["end"]
    assert not finalizer.alive
    assert ignored.kinds == [KeyboardInterrupt]  # the first
    finalizer()
    assert said.count("end") == 1
    assert {*interrupts._watched} <= watched


def test_a_farewell_that_is_called_or_detached_is_not_said_again(ignored: Ignored) -> None:
    said: list[str] = []
    watched, one, other = {*interrupts._watched}, Thing(), Thing()
    first, second = Finalizer(one, lambda: said.append("one")), Finalizer(other, lambda: said.append("other"))
    first()
    second.detach()
    assert (said, first.alive, second.alive) == (["one"], False, False)
    del one, other
    assert said == ["one"]
    assert {*interrupts._watched} <= watched
    with pytest.raises(ZeroDivisionError):
        Finalizer(Thing, lambda: 1 / 0)()


def test_a_lock_that_is_free_is_free_afterwards() -> None:
    lock = threading.Lock()
    assert if_free(lock, lambda: lock.locked() or 1 / 0)
    assert not lock.locked()
    with pytest.raises(ZeroDivisionError):
        if_free(lock, lambda: 1 / 0)
    assert not lock.locked()
    with lock:
        assert not if_free(lock, lambda: 1 / 0)
        assert lock.locked()


@pytest.mark.parametrize("where", ["begin", "block", "end", "nowhere"])
def test_a_guarded_section_ends_however_it_is_left(where: str) -> None:
    log: list[str] = []

    def begin() -> str:
        log.append("begin")
        if where == "begin":
            raise KeyboardInterrupt
        return "it"

    def end(failed: bool) -> None:
        log.append(f"end {failed}")
        if where == "end" and log.count("end False") < 3:
            raise KeyboardInterrupt

    def run() -> None:
        with guarded(begin, end) as value:
            assert value == "it"
            log.append("block")
            if where == "block":
                raise KeyboardInterrupt

    if where == "nowhere":
        run()
    else:
        with pytest.raises(KeyboardInterrupt):
            run()
    assert (
        log
        == {
            "begin": ["begin", "end True"],
            "block": ["begin", "block", "end True"],
            "end": ["begin", "block", "end False", "end False", "end False"],
            "nowhere": ["begin", "block", "end False"],
        }[where]
    )
    section = guarded(lambda: log.append("again"), end)
    section.__enter__()  # and nobody leaves it
    del section
    assert log[-1] == "end True"


def test_ctrl_c_at_any_line_leaves_torch_s_memory_in_the_pool(installed: None) -> None:
    """Once a section is over in which all threads have stock memory."""

    def section(_: object) -> None:
        with install.stock_everywhere():
            pass

    for _ in at_each_line(nullcontext, section, install, least=10):
        gc.collect()
        assert devices.require().block_size(torch.empty(2**12).data_ptr())


def test_a_lease_ends_with_whoever_has_it_on_any_thread(installed: None, other: Other) -> None:
    group, second = devices.require().group(), devices.require().group()
    held = [Lease()]
    for _ in range(2):
        held[0].enter(group)
        held[0].enter(second)
    assert (group.leases, second.leases) == (1, 1)
    other.does(held.clear)
    assert (group.leases, second.leases) == (0, 0)
    closed = Lease()
    closed.enter(group)
    closed.close()
    closed.close()
    assert group.leases == 0


# In a finalizer


def test_ctrl_c_at_any_line_of_what_follows_a_dropped_cache(installed: None, ignored: Ignored) -> None:
    model = build("llama", num_hidden_layers=2)
    device = devices.require()
    known = managers.of(device)._known.clients

    def begin() -> AbstractContextManager[list[KVCache]]:
        held = [KVCache(model.config)]
        with torch.no_grad():
            model(**INPUTS, past_key_values=held[0])
        assert len(known._paged) == 1
        return nullcontext(held)

    for _ in at_each_line(begin, list.clear, *FAREWELLS):
        gc.collect()
        known.drop_dead()
        assert len(known._paged) == 0
        device.reap(wait=True)
        assert device.snapshot()["pages"]["kv"] == 0
    assert set(ignored.kinds) <= {KeyboardInterrupt}


def test_ctrl_c_at_any_line_of_what_follows_a_dropped_model(installed: None, ignored: Ignored) -> None:
    """The model's pages, those of its twins, its hooks and its seat go, whichever line is interrupted."""
    device = devices.require()
    known = managers.of(device)._known.clients

    @contextmanager
    def begin() -> Iterator[list[Any]]:
        held = [build("llama", num_hidden_layers=1)]
        ballonet.manage(held[0], interval=1)
        with torch.no_grad():
            held[0](**INPUTS)
        layer = held[0].model.layers[0].mlp
        yield held
        gc.collect()
        assert not generation._attached.users
        assert not layer._forward_pre_hooks
        assert lease.current() is None
        del layer
        gc.collect()
        assert known.drop_dead() is not None
        assert not known.models
        device.trim()
        device.reap(wait=True)
        snapshot = device.snapshot()
        assert (snapshot["pages"]["weights"], snapshot["pages"]["kv"]) == (0, 0)
        assert snapshot["host_pages"] == snapshot["host_free"]
        device.check()

    for _ in at_each_line(begin, list.clear, *FAREWELLS, streamed, lease, most=30, least=50):
        pass
    assert set(ignored.kinds) <= {KeyboardInterrupt}


def test_ctrl_c_at_any_line_of_a_change_leaves_no_lock(installed: None, other: Other) -> None:
    """As they come when a traceback is kept: it keeps frames, and what is in them."""
    model = build("llama", num_hidden_layers=3)
    it = ballonet.manage(model, interval=1)
    seat = managers.of(devices.require())._known.clients.of_model(it._residency)
    kept: list[BaseException] = []

    def change(_: object) -> None:
        try:
            with it.editable():
                pass
            it._residency.change(lambda: it._follow(model, 1))
        except KeyboardInterrupt as error:
            kept.append(error)

    modules = (interrupts, lease, model_residency, arrangement, streamed, memory_manager)
    for _ in at_each_line(nullcontext, change, *modules, least=40):
        assert not seat.held
        assert not it._turns.sections
        assert it._turns._first() is None
        assert other.does(lambda: if_free(it._residency.captured.lock, lambda: None))
    assert len(kept) > 40
    it.release()


# The GIL, and forks

WAITING = """
    import ctypes, faulthandler, os, sys, threading, time
    from ballonet.allocator import _native
    faulthandler.dump_traceback_later(600, exit=True)  # also where nobody gets the GIL any more
    sys.setswitchinterval(1000)  # a thread runs until it lets go of the GIL
    device = _native.Device(library=sys.argv[1], ordinal=0, page_size=4096, budget=2**20, host_budget=2**16)
    gate = ctypes.CDLL(sys.argv[1])
    group = device.group()
    one = device.reserve(8 * 4096, "weights", group)
    one.map(0, 4)
    gone = [device.reserve(4096, "kv", group) for _ in range(2)]
    transfer, lease = _native.Transfer(device), _native.Lease()
    gone[1].map(0, 1)
    copied = [transfer.copy([(one.address, gone[1].address, 8)], after=0, owner="kv", to="device")]
    copied[0].wait()
    shown = [one.tensor(0, (4,), (1,), 1, 8)]
    calls = {
        "leads_to": lambda: one.leads_to(0), "page": lambda: one.page(0), "backed": lambda: one.backed,
        "reserve": lambda: device.reserve(4096, "kv", group), "tensor": lambda: one.tensor(0, (4,), (1,), 1, 8),
        "drop a tensor": shown.clear, "drop a range": gone.clear, "drop copies": copied.clear,
        "a new stream": lambda: _native.Transfer(device),
        "leases": lambda: group.leases, "enter": lambda: lease.enter(group),
        "note_use": lambda: one.note_use(0, False), "budget": lambda: device.budget, "peaks": device.reset_peaks,
        "snapshot": device.snapshot, "map": lambda: one.map(4, 1), "check": device.check,
    }
    gate.close_gate(UNMAPS)
    threads = [threading.Thread(target=lambda: one.move(0, "device"), daemon=True)]
    threads[0].start()
    while not gate.waiting():  # it has the locks of its group and of the mapper by then
        time.sleep(0.001)
    for call in calls.values():
        threads.append(threading.Thread(target=call, daemon=True))
        threads[-1].start()
    assert all(thread.is_alive() for thread in threads), [n for n, t in zip(calls, threads[1:]) if not t.is_alive()]
    gate.close_gate(0)
    for thread in threads:
        thread.join()
    lease.close()
    os._exit(0)
"""


def test_whoever_waits_for_the_core_lets_others_run(gate: Gate) -> None:
    program(WAITING.replace("UNMAPS", str(UNMAPS)), gate.path)


FORKING = """
    import ctypes, faulthandler, os, signal, sys, threading
    from ballonet.allocator import _native
    faulthandler.dump_traceback_later(600, exit=True)
    device = _native.Device(library=sys.argv[1], ordinal=0, page_size=4096, budget=2**20, host_budget=2**16)
    groups = [device.group() for _ in range(3)]
    ranges = [device.reserve(4 * 4096, "weights", group) for group in groups]
    for each in ranges:
        each.map(0, 4)
    over = threading.Event()
    ctypes.CDLL(sys.argv[1]).set_slow(2000)

    def move(number):
        while not over.is_set():
            ranges[number].move(0, "device")
            ranges[number].note_use(0, False)
            device.timeline()
            device.group()

    threads = [threading.Thread(target=move, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        if (child := os.fork()) == 0:
            signal.alarm(600)  # kills a child that waits for a thread that it does not have
            for group in groups:
                group.enter()
            made = device.group(), device.timeline(), device.events(), device.snapshot()
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            os._exit(3)
    over.set()
    for thread in threads:
        thread.join()
    device.check()
    os._exit(0)
"""


def test_a_fork_finds_no_lock_taken_while_pages_move(gate: Gate) -> None:
    """Whoever moves a page has its group's lock, and may wait for the mapper's."""
    program(FORKING, gate.path)


def test_tensors_are_swapped_all_or_none() -> None:
    @contextmanager
    def begin() -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        yield [torch.zeros(4) for _ in range(3)], [torch.ones(4) for _ in range(3)]

    def swap(pair: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        with moving.swapping() as pairs:
            pairs.extend(zip(*pair, strict=True))

    for (tensors, _), done in at_each_line(begin, swap, moving, least=10):
        first = tensors[0][0].item()
        assert [tensor[0].item() for tensor in tensors] == [first] * 3
        assert not done or first == 1.0
