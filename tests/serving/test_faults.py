"""Calls of the driver fail while batches are served: requests are answered, or told, and the loop lives.

In a process of its own, as what has failed must not matter to another test. With BALLONET_SOAK, which takes half an
hour, each call fails; else of each function the one in the middle.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.managed import Managed

from .. import programs
from ..faulting import ERRORS, at_each_call
from ..models import build
from ..test_manage_faults import settle
from ..tuned import tuning
from .batches import BLOCK, Answer, kv_to_the_host, looping, prompts, stock

PAGE = 16384
TOKENS = 16
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # a block has pages of its own
PATIENCE = 60  # seconds for all answers of a turn


@pytest.mark.parametrize("way", ["nothing is kept", "from files", "to the host"])
def test_a_fault_at_any_driver_call(way: str) -> None:
    """`way`: where KV comes from, or goes."""
    programs.run(f"from tests.serving.test_faults import run; run({way!r})")


def run(way: str) -> None:
    torch.set_num_threads(1)
    sizes = HEADS if way == "to the host" else {}
    model: Any = build("llama", num_hidden_layers=4 if sizes else 8, **sizes)
    asked = prompts(9, 60)
    asked.append([*asked[0], 5, 6])  # some blocks are found again
    expected = stock(model, asked, TOKENS)
    pages, host = (250, 800) if sizes else (48, 40)  # all KV fits on the host, or there is too little of everything
    ballonet.install(pages * PAGE, page_size=PAGE, host_budget=host * PAGE, device="cpu")
    device = devices.require()
    with ExitStack() as ends:
        ends.enter_context(tuning(waiting={"room": 0.1}, prefixes={"block": BLOCK, "again": 0}))
        options: dict[str, Any] = {}
        if way == "from files":
            options["prefix_dir"] = ends.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        elif way == "to the host":
            ends.enter_context(kv_to_the_host())
        managed = ends.enter_context(ballonet.manage(model, **options))
        gc.collect()
        gc.freeze()
        told, begun, left = Counter[str](), Counter[bool](), set[int]()
        # Pages that nobody has written to would hold the right bytes of the turn before.
        order = cycle((1, -1) if way == "to the host" else (1,))
        for times in (1, 2):  # what fails once is tried again, by the core
            act = lambda _: begun.update([turn(model, asked, expected, told, next(order))])  # noqa: E731
            # The loop has a thread of its own, and another one reads files: at load they make other calls.
            for _ in at_each_call(lambda: forgotten(managed), act, most=1, times=times, least=10):
                forgotten(managed)
                gc.collect()
                device.reap(wait=True)
                device.check()
                left.add(device.snapshot()["pages"]["kv"])
        print(f"loops that began, or did not: {begun}; told: {told}")
        assert begun[True] >= 0.8 * begun.total()
        assert len(left) == 1, "a cache that outlives its loop has always the same pages where it holds nothing"
        assert left == {0} or way == "from files"
        assert turn(model, asked, expected)
        if managed.prefixes is not None:
            assert managed.prefixes.counts.on_disk > 0
        assert (ballonet.stats().copied.kv_d2h > 0) or way != "to the host"
    last = settle(device)
    assert last["kv"] == last["weights"] == last["pending_free"] == 0, last


def forgotten(managed: Managed) -> AbstractContextManager[None]:
    """What is kept of prompts is in files only."""
    if managed.prefixes is not None:
        managed.prefixes.flush(60)
        managed.prefixes.clear()
    return nullcontext()


def turn(
    model: Any,
    asked: list[list[int]],
    expected: list[Answer],
    told: Counter[str] | None = None,
    order: int = 1,
) -> bool:
    """Asks all in one loop, -1: the last first, and compares. `told`: counts what requests that were not answered were
    told; where there is none all are. Did the loop begin? Once it has it must live."""
    answers: dict[str, Any] = {}
    added, prepare = threading.Event(), ContinuousBatchProcessor.prepare_next_batch
    with ExitStack() as ends:
        # The loop gets all requests at once: how many steps it makes does not depend on how slowly they come.
        after = patch.object(ContinuousBatchProcessor, "prepare_next_batch", lambda it: (added.wait(), prepare(it))[1])
        ends.enter_context(after)
        try:
            manager = ends.enter_context(looping(model, TOKENS))
        except ERRORS as error:
            assert told is not None
            told[f"no loop: {str(error)[:40]}"] += 1
            return False
        ends.callback(added.set)
        for number, prompt in [*enumerate(asked)][::order]:
            manager.add_request(prompt, request_id=str(number))
        added.set()
        end = time.monotonic() + PATIENCE
        while len(answers) < len(asked):
            assert time.monotonic() < end, f"{len(answers)} answers of {len(asked)}: {manager.batch_processor}"
            if (answer := manager.get_result(timeout=0.5)) is not None:
                answers[answer.request_id] = answer
        assert manager.background_thread_status.fatal_error is None
    for number, right in enumerate(expected):
        answer = answers[str(number)]
        if answer.error is None:
            assert answer.generated_tokens == right.tokens, number
        else:
            assert told is not None, answer.error
            told[answer.error[:60]] += 1
    return True
