"""Two models that are served at once, with arrivals, lengths, cancellations and ends of their loops at random, and a
budget that changes; another process watches how much memory there is.

BALLONET_SOAK=600 is the form of ten minutes, which says what it saw.
"""

from __future__ import annotations

import gc
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.generation.configuration_utils import ContinuousBatchingConfig

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetInUse

from ..models import build
from ..outside import Watcher
from ..pool import bytes_that_exist, take_out
from ..tuned import Tuned
from .batches import BLOCK, greedily, prompts, stock

PAGE = 65536
SECONDS = float(os.environ.get("BALLONET_SOAK", "4"))  # of arrivals; what is asked by then is answered
SEED = int(os.environ.get("BALLONET_SEED", "7"))
TOKENS = 24


class Loop:
    """The generation loop of one model."""

    def __init__(self, layers: int, asked: list[list[int]]) -> None:
        self.model: Any = build("llama", num_hidden_layers=layers)
        self.expected = stock(self.model, asked, TOKENS)
        self.asked = asked
        self.managed: Any = None
        self.waiting: dict[str, tuple[int, int]] = {}  # by name of the request: which prompt, and how many tokens
        self.answered = self.cancelled = self.refused = self.loops = 0
        self._manager: Any = None

    def manage(self, **options: Any) -> None:
        """As `ballonet.manage`, and begins the loop."""
        self.managed = ballonet.manage(self.model, **options)
        self._begin()

    def ask(self, number: int, tokens: int) -> None:
        """Without waiting for the answer."""
        self.waiting[self._manager.add_request(self.asked[number], max_new_tokens=tokens)] = number, tokens

    def cancel(self, draw: random.Random) -> None:
        """One of those that wait or run, if any does."""
        if self.waiting:
            name = draw.choice(list(self.waiting))
            del self.waiting[name]
            self._manager.cancel_request(name)
            self.cancelled += 1

    def hear(self, seconds: float) -> None:
        """Takes an answer, if one comes, and compares it with stock's."""
        reply = self._manager.get_result(timeout=seconds)
        if reply is None:
            assert self._manager.is_running(), "the loop has ended"
            return
        number, tokens = self.waiting.pop(reply.request_id, (None, 0))
        if number is None:
            return  # cancelled
        if reply.error is not None:
            assert "no memory" in reply.error or "needs" in reply.error or "out of memory" in reply.error, reply.error
            self.refused += 1
        else:
            assert reply.generated_tokens == self.expected[number].tokens[:tokens], (number, reply)
            self.answered += 1

    def again(self) -> None:
        """Ends the loop, whatever is asked of it is cancelled, and begins another."""
        for name in list(self.waiting):
            self._manager.cancel_request(name)
        self.cancelled += len(self.waiting)
        self.waiting.clear()
        self._end()
        self._begin()

    def release(self) -> None:
        self._end()
        self.managed.release()

    def _begin(self) -> None:
        self._manager = self.model.init_continuous_batching(
            generation_config=greedily(TOKENS),
            continuous_batching_config=ContinuousBatchingConfig(page_size=BLOCK, max_batch_tokens=64),
        )
        self._manager.start()
        self.loops += 1

    def _end(self) -> None:
        self._manager.stop(block=True, timeout=600)
        assert not self._manager.is_running()
        self._manager = None


def test_a_soak(tmp_path: Path, tuned: Tuned) -> None:
    """One of the models keeps prefixes in files, which are written and dropped meanwhile, the other on the device."""
    tuned(prefixes={"block": BLOCK})
    draw, asked = random.Random(SEED), prompts(12, 60)
    loops = [Loop(3, asked), Loop(5, asked)]
    ballonet.install(48 * PAGE, page_size=PAGE, host_budget=64 * PAGE, device="cpu")
    device = devices.require()
    kept: tuple[dict[str, Any], ...] = (
        {"prefix_dir": tmp_path / "prefixes", "prefix_dir_limit": "256KiB"},
        {"prefix_cache": True},
    )
    for loop, options in zip(loops, kept, strict=True):
        loop.manage(**options)
    budgets, changed, memory, most = (26, 36, 60), 0, list[int](), 0
    with Watcher(tmp_path, 48 * PAGE, 64 * PAGE) as watcher:
        began = looked = time.monotonic()
        asks = True
        while asks or any(loop.waiting for loop in loops):
            now = time.monotonic()
            asks = now < began + SECONDS or any(loop.answered <= 4 for loop in loops)
            for loop in loops:
                if asks:
                    for _ in range(draw.choice((0, 0, 1, 4))):
                        loop.ask(draw.randrange(len(asked)), draw.randint(1, TOKENS))
                    if draw.random() < 0.1:
                        loop.cancel(draw)
                    if draw.random() < 0.003:
                        loop.again()
                loop.hear(0.01)
            most = max(most, bytes_that_exist())
            if draw.random() < 0.02:
                pages = draw.choice(budgets)
                watcher.allow(max(pages * PAGE, ballonet.stats().budget))
                with suppress(BudgetInUse):
                    ballonet.set_budget(pages * PAGE, timeout=1)
                    changed += 1
                watcher.allow(ballonet.stats().budget)
            if now > looked + 1:
                device.check()
                memory.append(anonymous())
                looked = now
    seen = watcher.seen
    said = [(loop.answered, loop.cancelled, loop.refused, loop.loops) for loop in loops]
    print(f"{SECONDS:.0f} s; answered, cancelled, refused, loops of each model: {said}; budgets: {changed}; {seen}")
    print(f"MiB that are not of the pool, by part: {[size >> 20 for size in memory[:: max(1, len(memory) // 10)]]}")
    assert seen["over_device"] == seen["over_host"] == 0, seen
    assert most > 26 * PAGE
    assert 0 < seen["most_device"] <= max(budgets) * PAGE
    assert all(loop.answered > 4 for loop in loops)
    if SECONDS >= 60:
        assert memory[-1] < 1.1 * memory[len(memory) // 4] + 2**24, memory
    for loop in loops:
        loop.release()
    del loops, loop
    gc.collect()
    device.reap(wait=True)
    device.check()
    assert device.snapshot()["pages"]["kv"] == device.snapshot()["pages"]["weights"] == 0, said
    take_out()


def anonymous() -> int:
    """Bytes of memory of this process that are not of the memfds."""
    line = next(
        splitline for splitline in Path("/proc/self/status").read_text().splitlines() if splitline.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024
