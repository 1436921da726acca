"""Drops and restores that fail at any driver call, or are interrupted at any line: all is valid, and can be done again.

Driver calls in processes of their own: faults that were armed and not met must not fire in another test. With
BALLONET_SOAK, each call and each second or third line; else some of them.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ballonet
from ballonet.allocator import devices, install, interrupts
from ballonet.hooks import managed as managing
from ballonet.hooks.device import governors
from ballonet.hooks.forward import gate, turns
from ballonet.hooks.replicas import held_layers, ready_layers
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.hooks.streaming import arrangement, model_residency, streamed
from ballonet.hooks.weights import ranges
from ballonet.offload.governor import governor
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.residency import backing, layer_parts, mover, ring

from ...core import arm, calls, disarm, pending
from ...lines import interrupted
from ...models import build
from ...pool import bytes_that_exist, tiny_layers
from ...prefix.test_faults import ASKS
from ...programs import run
from ...streaming.conftest import BUDGET, PAGE
from ...test_manage_faults import ERRORS, settle
from ...tuned import Tuned, tuning
from .holding import logits

LAYERS = 3
ALL = "BALLONET_SOAK" in os.environ
KEPT = Span(1, 2)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [*((kind, phase) for kind in ("host", "file") for phase in ("prepare", "drop", "restore")), ("file", "look")],
)
def test_a_fault_at_any_driver_call(kind: str, phase: str) -> None:
    run(f"from tests.replicas.held.test_faults import live; live({kind!r}, {phase!r})")


def live(kind: str, phase: str) -> None:
    """In a process of its own: cycles of one model, in each of which one call fails."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, tuning(weights={"large": 2**11}):
        model = build("llama", num_hidden_layers=LAYERS)
        if kind == "file":
            model.save_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        expected = logits(model)
        ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
        cycles(model, expected, phase, absorbed=(kind, phase) == ("file", "prepare"))


def cycles(model: Any, expected: torch.Tensor, phase: str, absorbed: bool) -> None:
    """`absorbed`: nothing need fail, as little is asked for that cannot be done without."""
    device = devices.require()
    with ballonet.manage(model) as it:
        held = HeldLayers(it)
        acts: dict[str, Callable[[], object]] = {
            "prepare": lambda: list(held.prepare(range(LAYERS))),
            "drop": lambda: held.drop(KEPT),
            **({"look": model.state_dict} if phase == "look" else {}),  # at layers that lie in a file
            "restore": lambda: list(held.restore([2, 0])),
        }

        def home() -> None:
            """Whatever has left comes back, and nothing is ready."""
            held.close()
            if it._weights.on_host():
                with it._residency.changing() as layers:
                    layers.drop(it._weights.on_host())
                list(held.restore(range(LAYERS)))
                held.close()
            assert it._weights.on_host() == ()

        def cycle(place: tuple[str, int] | None = None) -> int:
            """How often an act failed."""
            failed = 0
            for what in acts:
                if what == phase and place is not None:
                    arm(*place)
                for _ in range(4):  # one that was armed and not met may strike later
                    try:
                        acts[what]()
                        break
                    except ERRORS:
                        failed += 1
                        assert torch.equal(logits(model), expected), (what, place)
                        device.check()
                else:
                    raise AssertionError(f"{what} fails again and again")
                assert torch.equal(logits(model), expected), (what, place)
                if what == "drop":
                    assert held.dropped == (0, 2)
            home()
            return failed

        cycle()
        cycle()
        before = {}
        counts: dict[str, dict[str, int]] = {}
        for what in acts:
            before = calls()
            acts[what]()
            counts[what] = {name: now - before[name] for name, now in calls().items() if now > before[name]}
        home()
        places = [
            (name, nth)
            for name, number in counts[phase].items()
            if not name.startswith(ASKS)
            for nth in range(1, number + 1)
            if ALL or nth in (1, 2, number) or nth % 4 == 0
        ]
        there, host = settle(device), bytes_that_exist("host")
        gc.collect()
        gc.freeze()
        struck, failed = device.snapshot()["faults"], 0
        for place in places:
            failed += cycle(place)
            if pending(place[0]):
                disarm()
            after = settle(device)
            assert {**after, "free": 0} == {**there, "free": 0}, place
            assert bytes_that_exist("host") <= host + PAGE, place
        struck = device.snapshot()["faults"] - struck
        print(f"{len(places)} places, {struck} struck, {failed} acts failed: {counts[phase]}")
        assert struck >= 0.8 * len(places)
        assert failed or absorbed


# -- Ctrl-C

LINES = (held_layers, ready_layers, managing, model_residency, arrangement, ranges, ring, layer_parts, mover, backing)
LOCKS = (interrupts, gate, governor, streamed, turns)


@pytest.fixture
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, BUDGET, PAGE):
        yield


@pytest.mark.parametrize(
    ("kind", "modules", "step"),
    [("host", LINES, 2 if ALL else 7), ("file", LINES, 3 if ALL else 8), ("host", LOCKS, 7 if ALL else 17)],
    ids=["host", "file", "locks"],
)
@pytest.mark.parametrize("what", ["prepare", "drop", "restore", "release"])
def test_ctrl_c_at_any_line_leaves_all_valid(
    installed: None, tmp_path: Path, kind: str, what: str, modules: Any, step: int
) -> None:
    """At some lines, and in what guards locks at fewer, where most lines are those of a loop."""
    with install.stock():
        model = build("llama", num_hidden_layers=2)
        expected = logits(model)
        if kind == "file":
            model.save_pretrained(tmp_path)
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    device = devices.require()
    with ballonet.manage(model) as it:
        seat = governors.of(device)._known.clients.of_model(it._residency)
        held = HeldLayers(it)
        at, came = 0, True
        while came:
            at += step
            list(held.prepare([0] if what != "prepare" else []))
            if what in ("restore", "release"):
                held.drop(Span(1, 2))
            act: Callable[[], object] = {
                "prepare": lambda: list(held.prepare([0])),
                "drop": lambda: held.drop(Span(1, 2)),
                "restore": lambda: list(held.restore([0])),
                "release": held.release,
            }[what]
            came = interrupted(act, at, *modules)
            assert not seat.held, at
            assert not it._turns.sections, at
            assert it._weights.group.leases == 0, at
            assert torch.equal(logits(model), expected), at
            device.check()
            held.drop(Span(1, 2))
            assert torch.equal(logits(model), expected), at
            assert [each.layer for each in held.restore([0])] == [0], at
            held.close()
            assert it._weights.on_host() == (), at
            assert torch.equal(logits(model), expected), at
        assert at > 10
        held.close()
    settle(device)
    assert device.snapshot()["pages"]["weights"] == 0
