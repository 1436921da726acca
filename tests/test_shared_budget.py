"""Processes that share a budget: pages follow the load, tokens are stock's, and together they never have more than
there is, as the kernel says from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import control, devices
from ballonet.allocator.config import Config, ledger_dir
from ballonet.allocator.errors import BudgetInUse, ControlRefused, LedgerDamaged, SharedBudgetError
from ballonet.allocator.shared_ledger import SharedLedger, ledgers, started
from ballonet.hooks.device import shared, shared_total
from ballonet.hooks.watch import registry
from ballonet.hooks.watch.processes import WatchedProcesses
from ballonet.offload.policy.shares import SHARING, Sharing

from .core import eventually
from .models import build, prompts
from .pool import take_out
from .sharing import PAGE, SIZES, Process, Watcher, share_in
from .tuned import Tuned

MIB = 2**20
FLOOR = 4 * PAGE
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts processes, which share a folder with this one."""
    share_in(tmp_path, monkeypatch)
    with ExitStack() as started:

        def begin(share: int | bool, kind: str = "tensors") -> Process:
            process = started.enter_context(Process(share, kind, tmp_path))
            assert process.answer() == "ready"
            return process

        yield begin


def change(total: int | None = None) -> list[dict[str, Any]]:
    """Who has what, after the total has changed."""
    return shared_total.change_total(None, total, 60.0)


def parts() -> dict[int, int]:
    (row,) = change()
    return {part["pid"]: part["part"] for part in row["parts"]}


def within(watcher: Watcher) -> None:
    assert watcher.looks
    assert not watcher.over, f"{watcher.together} bytes together"


def test_process_that_needs_pages_gets_those_of_an_idle_one(start: Start) -> None:
    first, second = start(16 * MIB), start(True)
    with Watcher([first.pid, second.pid], 16 * MIB) as watcher:
        assert first.do(f"get {10 * MIB}") == "get"
        assert second.do(f"get {4 * MIB}") == "get"
        assert second.do(f"get {8 * MIB}") == "out of memory", "what is in use stays"
        first.do("drop")
        assert second.do(f"get {10 * MIB}") == "get"
        eventually(lambda: watcher.most[second.pid] >= 14 * MIB)
        second.do("drop")
        assert first.do(f"get {15 * MIB}") == "get"
    within(watcher)
    assert watcher.together > 14 * MIB
    assert sum(parts().values()) <= 16 * MIB
    assert all(part >= FLOOR for part in parts().values())


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_ledger_that_is_removed_while_it_is_used_counts_nothing_twice(start: Start, what: str) -> None:
    """Whoever has a part joins again."""
    first, second = start(16 * MIB), start(True)
    assert first.do(f"get {10 * MIB}") == "get"
    if what == "file":
        (ledger_dir() / "shared-cpu.json").unlink()
    else:
        ledger_dir().rename(ledger_dir().with_name("aside"))  # at once: it is made again before all of it is removed
    eventually(lambda: [len(row["parts"]) for row in change()] == [2])
    with Watcher([first.pid, second.pid], 16 * MIB) as watcher:
        assert parts()[first.pid] >= 10 * MIB
        assert second.do(f"get {8 * MIB}") == "out of memory"
        first.do("drop")
        assert second.do(f"get {8 * MIB}") == "get"
    within(watcher)
    assert sum(parts().values()) <= 16 * MIB


def test_process_that_is_killed_gives_its_part_back(start: Start) -> None:
    first, second = start(16 * MIB), start(16 * MIB)
    with Watcher([first.pid, second.pid], 16 * MIB) as watcher:
        first.do(f"get {12 * MIB}")
        assert second.do(f"get {8 * MIB}") == "out of memory"
        first.kill()
        assert second.do(f"get {15 * MIB}") == "get"
    within(watcher)
    assert parts().keys() == {second.pid}


@pytest.mark.parametrize("when", ["before it is asked", "before it gives"])
def test_process_that_is_stopped_keeps_its_part_and_nobody_waits_for_it_twice(
    start: Start, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Others do as if it used all that it has."""
    process, asked, stock = start(16 * MIB), list[int](), shared.facts_of
    process.do(f"get {12 * MIB}")
    process.do("drop")

    def counted(pid: int, number: int, patience: float) -> Any:
        asked.append(pid)
        if when == "before it is asked":
            return stock(pid, number, 0.05)
        answer = stock(pid, number, 60.0)
        stop()
        return answer

    def stop() -> None:
        (ledger,) = ledgers()
        with ledger._changing():  # which it does not hold then
            process.stop()

    monkeypatch.setattr(shared, "facts_of", counted)
    if when == "before it is asked":
        stop()
    with here(True, replace(SHARING, silent=600.0)) as share:
        assert not asked, "its floor was free"
        share.reserve(8 * MIB)
        share.reserve(8 * MIB)
        assert asked == [process.pid]
        assert share.part < 8 * MIB
        monkeypatch.setattr(shared, "facts_of", stock)
        os.kill(process.pid, signal.SIGCONT)

        def given() -> bool:
            share._silent.clear()
            share.reserve(8 * MIB)
            return share.part >= 8 * MIB

        eventually(given)


def test_pages_that_steps_lack_are_asked_for_and_may_come_as_long_as_others_use_them(start: Start) -> None:
    process, sharing = start(16 * MIB), replace(SHARING, dwell=0.0, patience=60.0, answer=60.0, lacking=600.0)
    process.do(f"get {12 * MIB}")
    with here(True, sharing) as share:
        assert not share.may_grow
        before = share.part
        share.lacks(14 * MIB)
        eventually(lambda: share._refused > 0)  # it was asked
        assert share.may_grow, "of which the other is due some"
        assert share.facts()["wanted"] > share.part
        with share._moving:  # so that nothing is asked yet
            share.lacks(0)
            share.lacks(7 * MIB - share.part)
            assert share.may_grow
        eventually(lambda: not share.may_grow)  # this process is due it, and the other cannot give
        process.do("drop")
        eventually(lambda: share.part >= 7 * MIB)
        assert share.part > before


def test_a_ledger_that_stays_is_not_read_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(16 * MIB)
    read, reads = SharedLedger.read, list[int]()
    with here(True, replace(SHARING, reread=600.0)) as share:
        share._keep_ahead()
        monkeypatch.setattr(SharedLedger, "read", lambda ledger: (reads.append(1), read(ledger))[1])
        for _ in range(20):
            share._keep_ahead()
        assert not reads
        share.ledger.aim(12 * MIB)
        share._keep_ahead()
        assert reads
        assert share.facts()["total"] == 12 * MIB


@contextmanager
def here(wanted: int | bool, sharing: Sharing = SHARING, **settings: Any) -> Iterator[shared.Share]:
    """Has this process share it, too."""
    devices.start(Config(device="cpu", page_size=PAGE, budget=64 * MIB, host_budget=0, **settings))
    try:
        shared.join(devices.of(), wanted, 0, 0, sharing)
        share = devices.of().shared
        assert isinstance(share, shared.Share)
        yield share
    finally:
        devices.stop()
        control.stop()


def test_the_total_changes_while_they_run(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = start(16 * MIB), start(True)
    with Watcher([first.pid, second.pid], 16 * MIB) as watcher:
        first.do(f"get {6 * MIB}")
        second.do(f"get {6 * MIB}")
        second.do("drop")
        assert main(["budget", "--shared", "8MiB", "--json"]) == 0, capsys.readouterr().err
        (row,) = json.loads(capsys.readouterr().out)
        assert row["total"] == 8 * MIB
        watcher.total = 8 * MIB
        assert sum(part["part"] for part in row["parts"]) <= 8 * MIB
        assert second.do(f"get {4 * MIB}") == "out of memory"
        with pytest.raises(SharedBudgetError, match="cannot give: the total is 8MiB as before"):
            change(4 * MIB)
        assert first.do(f"get {MIB}") == "get", "what was free stays free"
        watcher.total = 16 * MIB
        change(16 * MIB)
        assert second.do(f"get {6 * MIB}") == "get"
    within(watcher)


def test_three_models_share_and_answer_as_stock(start: Start) -> None:
    """The total is too little for all weights and caches of two; each works in turn, and then all at once."""
    torch.set_num_threads(1)
    model = build("llama", **SIZES)
    stock = model.generate(**prompts(2, 16), max_new_tokens=32, do_sample=False).tolist()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = (weights * 3 // 2 + 2 * MIB) // PAGE * PAGE
    processes = [start(total, "model")]
    with Watcher([processes[0].pid], total) as alone:
        assert processes[0].do("say 32") == stock
    within(alone)
    processes += [start(True, "model"), start(True, "model")]

    def pages_follow(process: Process) -> bool:
        """Has it the largest part once it has worked?"""
        assert process.do("say 32") == stock
        return parts()[process.pid] == max(parts().values())

    with Watcher([process.pid for process in processes], total) as watcher:
        for peer in processes:
            before = dict(watcher.most)
            watcher.most = dict.fromkeys(before, 0)
            eventually(partial(pages_follow, peer))
        for peer in processes:
            peer.begin("say 32")
        assert [process.answer() for process in processes] == [stock] * 3
    within(watcher)
    assert all(watcher.most.values())


def test_refused_join_does_nothing(start: Start) -> None:
    process = start(16 * MIB)
    with pytest.raises(SharedBudgetError, match="is 16MiB, and not 8MiB"), here(8 * MIB):
        pass
    with pytest.raises(SharedBudgetError, match="BALLONET_CONTROL=0 forbids"), here(True, control=False):
        pass
    assert parts().keys() == {process.pid}
    with here(True), pytest.raises(ControlRefused, match="are left for it: ask for that or less"):
        control.ask(os.getpid(), 16 * MIB, 1.0)
    (path,) = ledger_dir().glob("shared-*.json")
    path.write_text("{")
    with pytest.raises(LedgerDamaged, match="delete the file"), here(True):
        pass
    assert process.do(f"get {4 * MIB}") in ("get", "out of memory"), "it keeps what it has"


def test_a_total_waits_for_who_answers_late(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process, asked = start(16 * MIB), list[int]()
    process.do(f"get {12 * MIB}")
    process.do("drop")
    stock = shared_total.ask_to_give

    def late(pid: int, *args: Any) -> bool | None:
        asked.append(pid)
        return stock(pid, *args) if len(asked) > 3 else None

    monkeypatch.setattr(shared_total, "ask_to_give", late)
    (row,) = change(6 * MIB)
    assert (row["total"], asked[:4]) == (6 * MIB, [process.pid] * 4)


def test_figures_are_published(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WatchedProcesses.__init__.__kwdefaults__, "patience", 60.0)
    process = start(16 * MIB)
    with here(True) as share:
        for what, wanted in {"total": 16 * MIB, "part": share.part, "floor": FLOOR}.items():
            assert registry.REGISTRY.get_sample_value("ballonet_shared_budget_bytes", {"what": what}) == wanted
        main(["budget", "--shared", "--json"])
        (row,) = json.loads(capsys.readouterr().out)
        assert {part["pid"] for part in row["parts"]} > {process.pid}
        main(["top", str(process.pid), "--once"])
        assert "16MiB, with other processes" in " ".join(capsys.readouterr().out.split())


# -- while a model of its own runs: what that needs before it can give is not refused


@pytest.fixture
def share(tmp_path: Path, tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> Iterator[shared.Share]:
    """The part of this process, which has all that there is."""
    share_in(tmp_path, monkeypatch)
    tuned(weights={"large": 2**11})
    ballonet.install(64 * MIB, page_size=PAGE, host_budget="64MiB", device="cpu", spill=False)
    shared.join(devices.of(), 16 * MIB, 0, 0, replace(SHARING, patience=300.0))
    part = devices.of().shared
    assert isinstance(part, shared.Share)
    yield part
    take_out()


@pytest.mark.parametrize("known", [True, False])
def test_a_part_is_lowered_where_the_ledger_was_replaced_and_another_process_has_the_bytes(
    share: shared.Share, known: bool
) -> None:
    share.reserve(8 * MIB)
    assert share.part >= 8 * MIB
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        rows = {other.pid: [started(other.pid), 0, 14 * MIB, 0]}
        if known:
            rows[os.getpid()] = [started(os.getpid()), 0, MIB, share.floor]
        new = share.ledger.path.with_suffix(".other")
        new.write_text(json.dumps({"total": 16 * MIB, "target": 16 * MIB, "parts": rows}))
        new.replace(share.ledger.path)
        eventually(lambda: share.part == 2 * MIB)
        assert devices.require().budget == 2 * MIB
        assert {pid: part.nbytes for pid, part in share.ledger.read().parts.items()} == {
            other.pid: 14 * MIB,
            os.getpid(): 2 * MIB,
        }
        other.kill()


def test_an_allocation_in_a_forward_goes_before_what_others_ask(share: shared.Share) -> None:
    model = build("llama", num_hidden_layers=8, hidden_size=64, intermediate_size=512)
    expected = model(**prompts(2, 16)).logits
    refused, given = list[BudgetInUse](), list[torch.Tensor]()

    def give() -> None:
        try:
            share.give(share.floor, 600.0)
        except BudgetInUse as error:
            refused.append(error)

    def in_the_middle(*_: Any) -> None:
        device = devices.require()
        while device.available:
            given.append(torch.empty(PAGE, dtype=torch.uint8))
        giving = threading.Thread(target=give)
        giving.start()
        while giving.is_alive():  # pages that others leave meanwhile are taken, too
            if device.budget < share.part:
                given.append(torch.empty(PAGE, dtype=torch.uint8))
        assert device.budget == share.part
        given.clear()

    with ballonet.manage(model):
        model(**prompts(2, 16))
        layer = model.model.layers[4].self_attn
        hook = layer.register_forward_hook(in_the_middle)
        assert torch.equal(model(**prompts(2, 16)).logits, expected)
        hook.remove()
        assert refused
        share.give(8 * MIB, 10.0)
        assert share.part == 8 * MIB, "once it rests"
