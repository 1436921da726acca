"""Two models that are served at once, with arrivals, lengths and cancellations at random, and a budget that changes."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator.errors import BudgetInUse

from ..models import build
from ..pool import bytes_that_exist, take_out
from ..tuned import Tuned
from .batches import BLOCK, prompts, stock

PAGE = 65536
SECONDS = float(os.environ.get("BALLONET_SOAK", "4"))  # of arrivals; what is asked by then is answered
TOKENS = 24


class Loop:
    """The generation loop of one model."""

    def __init__(self, layers: int, asked: list[list[int]]) -> None:
        self.model: Any = build("llama", num_hidden_layers=layers)
        self.expected = stock(self.model, asked, TOKENS)
        self.asked = asked
        self.managed: Any = None
        self.waiting: dict[str, int] = {}  # by name of the request, which prompt it has
        self.answered = self.cancelled = self.refused = 0
        self._manager: Any = None

    def begin(self, **options: Any) -> None:
        self.managed = ballonet.manage(self.model, **options)
        self._manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(page_size=BLOCK, max_batch_tokens=64),
        )
        self._manager.start()

    def ask(self, number: int) -> None:
        """Without waiting for the answer."""
        self.waiting[self._manager.add_request(self.asked[number], max_new_tokens=TOKENS)] = number

    def cancel(self, draw: random.Random) -> None:
        """One of those that wait, if any does."""
        if self.waiting:
            name = draw.choice(list(self.waiting))
            del self.waiting[name]
            self._manager.cancel_request(name)
            self.cancelled += 1

    def hear(self, seconds: float) -> None:
        """Takes an answer, if one comes, and compares it with stock's."""
        found = self._manager.get_result(timeout=seconds)
        if found is None:
            assert self._manager.is_running(), "the loop has ended"
            return
        number = self.waiting.pop(found.request_id, None)
        if number is None:
            return  # cancelled
        if found.error is not None:
            assert "no memory" in found.error or "needs" in found.error or "out of memory" in found.error, found.error
            self.refused += 1
        else:
            assert found.generated_tokens == self.expected[number].tokens, (number, found)
            self.answered += 1

    def end(self) -> None:
        self._manager.stop(block=True, timeout=60)
        self._manager = None
        self.managed.release()


def test_a_soak(tmp_path: Path, tuned: Tuned) -> None:
    """One of the models keeps prefixes, in files that are written and dropped meanwhile."""
    tuned(prefixes={"block": BLOCK})
    draw, asked = random.Random(7), prompts(12, 60)
    loops = [Loop(3, asked), Loop(5, asked)]
    ballonet.install(48 * PAGE, page_size=PAGE, host_budget=64 * PAGE, device="cpu")
    for loop, options in zip(loops, ({"prefix_dir": tmp_path, "prefix_dir_limit": "256KiB"}, {}), strict=True):
        loop.begin(**options)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or any(loop.waiting for loop in loops):
        for loop in loops:
            if time.monotonic() < end:
                for _ in range(draw.choice((0, 0, 1, 4))):
                    loop.ask(draw.randrange(len(asked)))
                if draw.random() < 0.1:
                    loop.cancel(draw)
            loop.hear(0.01)
        if draw.random() < 0.02:
            with suppress(BudgetInUse):
                ballonet.set_budget(draw.choice((36, 48, 60)) * PAGE, timeout=1)
        assert bytes_that_exist() <= ballonet.stats().budget
    assert all(loop.answered > 4 for loop in loops)
    said = [(loop.answered, loop.cancelled, loop.refused) for loop in loops]
    for loop in loops:
        loop.end()
    device = runtime.require()
    device.reap(wait=True)
    device.check()
    assert device.snapshot()["pages"]["kv"] == device.snapshot()["pages"]["weights"] == 0, said
    del loops, loop
    take_out()
