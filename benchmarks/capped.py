"""Peers that may use so many bytes of the device and no more: stock, and managed. What the pool decided meanwhile.

On a GPU stock is torch's own allocator, held to the budget by `torch.cuda.set_per_process_memory_fraction`. A CPU's has
no such limit, so there stock is the model as it is, with stock's cache, in a pool of that budget in which nothing gives
way: unmanaged, and without pages of the host. Both raise `torch.OutOfMemoryError` at the budget.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from budgets import LAYERS, OURS, page_size, unlimited
from common import Options
from llama import build, few
from transformers import DynamicCache, PreTrainedModel

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetInUse


class Held:
    """A model in a process that may use so many bytes of the device."""

    def __init__(self, peer: str, chosen: Options, budget: int | None = None) -> None:
        """`peer`: `STOCK` or `OURS`; `budget`: bytes, None: no limit."""
        self.peer = peer
        self.device = chosen.device
        self._unlimited = unlimited(chosen)
        self._pool = peer == OURS or not chosen.cuda
        if self._pool:
            first = self._unlimited if budget is None else budget
            ballonet.install(first, page_size=page_size(chosen), spill=peer == OURS)
        elif budget is not None:
            self.hold(budget)
        self.model: PreTrainedModel = build(few(chosen, LAYERS[chosen.kind]), chosen.device)
        self.managed = ballonet.manage(self.model) if peer == OURS else None

    def hold(self, budget: int | None) -> None:
        """Changes the limit, bytes; None: there is none."""
        gc.collect()
        if self._pool:
            ballonet.set_budget(self._unlimited if budget is None else budget)
            return
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else budget / total)

    def cache(self) -> DynamicCache:
        """An empty one, of the peer's own kind."""
        config = self.model.config
        return ballonet.KVCache(config=config) if self.peer == OURS else DynamicCache(config=config)

    def memory(self) -> tuple[int, int]:
        """Bytes of the device: now, and at most since `reset`."""
        if self._pool:
            found = devices.require().snapshot()
            return found["page_size"] * sum(found["pages"].values()), found["physical_peak"]
        return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()

    def reset(self) -> None:
        """What is not in use goes back to the driver, and the peak is what is left."""
        gc.collect()
        if self._pool:
            device = devices.require()
            device.trim()
            device.reset_peaks()
        else:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def settle(self) -> None:
        """All layers are resident, at once: the model is managed anew if need be."""
        if self.managed is not None and self.managed.report().streamed:
            self.managed.release()
            self.managed = ballonet.manage(self.model)

    def press(self, budget: int, work: Callable[[], object], patience: float = 10.0) -> int:
        """Shrinks the budget to so many bytes, or as far as it can come; returns what it is now.

        What may be taken for that needs a host copy, and gets one while `work` uses the model with few pages left:
        where the budget is refused so far, that is done, for so many seconds at most."""
        end = time.monotonic() + patience
        while True:
            try:
                ballonet.set_budget(budget)
                return devices.require().budget
            except BudgetInUse as error:
                with suppress(BudgetInUse):
                    ballonet.set_budget(error.smallest)
                if time.monotonic() > end:
                    return devices.require().budget
            work()


def decided(before: ballonet.Stats | None = None) -> str:
    """What gave pages since then, or ever: `"idle weights 12, running KV 40"`; empty where nothing did."""
    found = ballonet.stats()
    pages: dict[str, int] = {}
    for lever, verbs in found.events.items():
        for verb in ("pull", "yield"):
            count = verbs[verb].pages if verb in verbs else 0
            if before is not None and lever in before.events and verb in before.events[lever]:
                count -= before.events[lever][verb].pages
            pages[lever] = pages.get(lever, 0) + count
    return ", ".join(f"{lever} {count}" for lever, count in pages.items() if count)
