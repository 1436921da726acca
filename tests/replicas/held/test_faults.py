"""Drops and restores that fail at any driver call, or are interrupted at any line: all is valid, and can be done again.

Driver calls in processes of their own, as what has failed must not matter to another test.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ballonet
from ballonet.allocator import devices, install, interrupts
from ballonet.hooks import managed as managing
from ballonet.hooks.device import managers
from ballonet.hooks.forward import gate, lease
from ballonet.hooks.replicas import held_layers
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.hooks.streaming import arrangement, model_residency, streamed
from ballonet.hooks.weights import ranges
from ballonet.offload.manager import memory_manager
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.residency import backing, mover, ring

from ...faulting import at_each_call, at_each_line
from ...models import build
from ...pool import bytes_that_exist, tiny_layers
from ...programs import run
from ...streaming.conftest import BUDGET, PAGE
from ...test_manage_faults import settle
from ...tuned import Tuned, tuning
from .holding import logits

LAYERS = 3
MOST = 6  # calls of a function that fail
LINE_MOST = 48
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
        at = [*acts].index(phase)
        settled: list[tuple[dict[str, int], int]] = []

        def right() -> None:
            assert torch.equal(logits(model), expected)
            device.check()

        @contextmanager
        def cycle() -> Iterator[None]:
            """Whatever has left comes back in the end, and nothing is ready."""
            for what in [*acts][:at]:
                acts[what]()
            yield
            for what in [*acts][at + 1 :]:
                acts[what]()
                right()
            held.close()
            if it._weights.on_host():
                with it._residency.changing() as layers:
                    layers.drop(it._weights.on_host())
                list(held.restore(range(LAYERS)))
                held.close()
            assert it._weights.on_host() == ()
            settled.append(({**settle(device), "free": 0}, bytes_that_exist("host")))
            assert settled[-1][0] == settled[0][0]
            assert settled[-1][1] <= settled[0][1] + PAGE

        gc.collect()
        gc.freeze()
        failed = 0
        for _, done in at_each_call(cycle, lambda _: acts[phase](), most=MOST):
            failed += not done
            right()
            if not done:
                acts[phase]()
                right()
            assert phase != "drop" or held.dropped == (0, 2)
        assert failed or absorbed


# -- Ctrl-C

LINES = (held_layers, managing, model_residency, arrangement, ranges, ring, mover, backing)
LOCKS = (interrupts, gate, memory_manager, streamed, lease)


@pytest.fixture
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, BUDGET, PAGE):
        yield


@pytest.mark.parametrize(
    ("kind", "modules"), [("host", LINES), ("file", LINES), ("host", LOCKS)], ids=["host", "file", "locks"]
)
@pytest.mark.parametrize("what", ["prepare", "drop", "restore", "release"])
def test_ctrl_c_at_any_line_leaves_all_valid(
    installed: None, tmp_path: Path, kind: str, what: str, modules: Any
) -> None:
    """At some lines; most of those in what guards locks are of a loop."""
    with install.stock():
        model = build("llama", num_hidden_layers=2)
        expected = logits(model)
        if kind == "file":
            model.save_pretrained(tmp_path)
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    device = devices.require()
    with ballonet.manage(model) as it:
        seat = managers.of(device)._known.clients.of_model(it._residency)
        held = HeldLayers(it)
        acts: dict[str, Callable[[], object]] = {
            "prepare": lambda: list(held.prepare([0])),
            "drop": lambda: held.drop(Span(1, 2)),
            "restore": lambda: list(held.restore([0])),
            "release": held.release,
        }

        @contextmanager
        def begin() -> Iterator[None]:
            list(held.prepare([0] if what != "prepare" else []))
            if what in ("restore", "release"):
                held.drop(Span(1, 2))
            yield
            held.drop(Span(1, 2))
            assert torch.equal(logits(model), expected)
            assert [layer.layer for layer in held.restore([0])] == [0]
            held.close()
            assert it._weights.on_host() == ()
            assert torch.equal(logits(model), expected)

        for _ in at_each_line(begin, lambda _: acts[what](), *modules, most=LINE_MOST, least=40):
            assert not seat.held
            assert not it._turns.sections
            assert it._weights.group.leases == 0
            assert torch.equal(logits(model), expected)
            device.check()
        held.close()
    settle(device)
    assert device.snapshot()["pages"]["weights"] == 0
