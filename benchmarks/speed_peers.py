"""The processes of bench_speed.py: each holds one model, stock or managed, and decodes as it is asked."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import MIB, Options
from decoding import decoded
from generating import Clock, answer, timed, words
from llama import build, filled, streamable
from peer import Functions, seconds, synchronize
from streamed import page_size
from torch.backends import cuda
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import ballonet

WARM = 4  # tokens of a call of `generate()` before the first that is timed: by then all run by graphs
STEPS = 12  # tokens of each call
REPEATED = 100  # attentions with the same inputs


def functions(name: str, chosen: Options) -> Functions:
    """What a peer answers. `cudnn`: may torch take cuDNN's attention?"""
    peer = SpeedPeer(name, chosen)
    names = ("first", "decode", "kernels", "logits", "difference", "memory", "static", "prefill", "stream", "pieces")
    return {"about": dict, **{each: getattr(peer, each) for each in (*names, "attention", "repeats")}}


class SpeedPeer:
    """One model, and what a token of it takes."""

    def __init__(self, name: str, chosen: Options) -> None:
        if chosen.kind != "cuda":
            torch.set_num_threads(1)
        self.name = name
        self.device = chosen.device
        self.is_managed = name in ("no pieces", "pieces")
        if self.is_managed:
            ballonet.install("60GiB" if chosen.kind == "cuda" else "4GiB", page_size=page_size(chosen))
        self.model: PreTrainedModel = build(streamable(chosen), self.device)
        self.managed = ballonet.manage(self.model, pieces=self._pieces) if self.is_managed else None

    @property
    def _pieces(self) -> Any:
        return None if self.name == "no pieces" else "auto"

    def first(self, batch: int, held: int, cudnn: bool) -> float:
        """Seconds that the first call of `generate()` takes longer than the next one."""
        with attention_by(cudnn):
            took = [self._generated(batch, held)[1] for _ in range(2)]
        return took[0] - took[1]

    def decode(self, batch: int, held: int, cudnn: bool) -> dict[str, float]:
        """ms per token, and of those that the host takes to submit it."""
        with attention_by(cudnn):
            clock, _ = self._generated(batch, held)
        self._forget()
        return {"ms": clock.ms(WARM - 1), "host": clock.host_ms(WARM - 1)}

    def kernels(self, batch: int, held: int, cudnn: bool) -> float:
        """ms that kernels run per token."""
        with attention_by(cudnn):
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            seen = 0

            def count() -> int:
                nonlocal seen
                seen += 1
                if seen == WARM:
                    profiler.start()
                elif seen == STEPS:
                    profiler.stop()
                return 0

            self._generated(batch, held, Clock(self.device, count))
        self._forget()
        return sum(kernel.self_device_time_total for kernel in profiler.key_averages()) / (STEPS - WARM) / 1e3

    def logits(self, batch: int, held: int, path: str) -> None:
        """Writes the logits of each token to a file, without cuDNN's attention."""
        torch.save(self._logits(batch, held), path)

    def difference(self, batch: int, held: int, path: str) -> float:
        """The largest difference of a logit to those in the file."""
        mine, theirs = self._logits(batch, held), torch.load(path)
        return float((mine.double() - theirs.double()).abs().max()) if mine.shape == theirs.shape else float("inf")

    def memory(self, batch: int, held: int) -> dict[str, float]:
        """MiB of the pages under all graphs, and of what the driver has taken for graphs of this batch."""
        assert self.managed is not None
        self._generated(1, held)
        before = self._outside()
        self._generated(batch, held)
        driver = self._outside() - before
        found = self.managed.report().pieces
        pages = 0 if found is None else found.pages
        return {"pages": pages * ballonet.stats().page_size / MIB, "driver": driver / MIB}

    def static(self, batch: int, held: int) -> dict[str, float]:
        """transformers' `StaticCache`, of which a decode step is compiled: ms per token, seconds that the first call
        takes longer, MiB that it takes."""
        prompt = words(self.model, (batch, held), 0).to(self.device)
        before, clocks = self._free(), [Clock(self.device) for _ in range(3)]  # the second call may compile again

        def generate(clock: Clock) -> object:
            return answer(self.model, prompt, STEPS, clock, cache_implementation="static")

        took = [seconds(self.device, partial(generate, clock)) for clock in clocks]
        return {"ms": clocks[-1].ms(WARM - 1), "first": took[0] - took[-1], "mib": (before - self._free()) / MIB}

    def prefill(self, tokens: int, cudnn: bool) -> float:
        """ms of a prompt's forward."""
        from bench_prefill import prefill

        with attention_by(cudnn):
            return prefill("ballonet" if self.is_managed else "stock", self.model, tokens, self.device)

    def stream(self, held: int) -> dict[str, Any]:
        """ms per token while every second layer streams, and the bytes that come over the link for it."""
        assert self.managed is not None
        self.managed.release()
        with ballonet.manage(self.model, interval=2, pieces=self._pieces):
            found = [decoded("interval 2", self.model, self.device, 1, held, STEPS) for _ in range(2)]
        self.managed = ballonet.manage(self.model, pieces=self._pieces)
        return found[-1]

    def pieces(self) -> str:
        """How the model decodes."""
        assert self.managed is not None
        return str(self.managed.report().pieces or "no graphs on this device")

    def attention(self, held: int, cudnn: bool, new: bool) -> float:
        """ms of the host for one attention, at a length that was there before, or a new one each time."""
        took = list[float]()
        with attention_by(cudnn):
            for step in range(WARM + STEPS):
                given = self._states(1, held + (step if new else 0))
                synchronize(self.device)
                begin = time.perf_counter()
                scaled_dot_product_attention(*given, enable_gqa=True)
                took.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(took[WARM:])

    def repeats(self, batch: int, held: int, cudnn: bool) -> int:
        """How many of some attentions under a mask, with the same inputs, have other bits than the first."""
        given = self._states(batch, held)
        mask = torch.ones(batch, 1, 1, held, dtype=torch.bool, device=self.device)
        mask[0, ..., : held // 2] = False
        with attention_by(cudnn):
            first, *others = (
                scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True) for _ in range(REPEATED)
            )
            return sum(not torch.equal(first, other) for other in others)

    def _states(self, batch: int, held: int) -> list[torch.Tensor]:
        """Queries, keys and values of one layer, for one new token."""
        config = self.model.config
        width = config.hidden_size // config.num_attention_heads
        kinds = ((config.num_attention_heads, 1), *((config.num_key_value_heads, held),) * 2)
        given = {"dtype": self.model.dtype, "device": self.device}
        return [torch.randn(batch, heads, tokens, width, **given) for heads, tokens in kinds]

    def _generated(self, batch: int, held: int, clock: Clock | None = None) -> tuple[Clock, float]:
        """Generates from a cache of so many tokens; returns the clock, and the seconds of all of it."""
        cache = filled("ballonet" if self.is_managed else "stock", self.model.config, batch, held, self.device)
        clock = clock or Clock(self.device)
        size = batch, held
        took = seconds(self.device, lambda: timed(self.model, cache, size, self.device, STEPS, clock))
        return clock, took

    def _logits(self, batch: int, held: int) -> torch.Tensor:
        """Logits of each new token, on the CPU."""
        prompt = words(self.model, (batch, held), 0).to(self.device)
        more = {"output_logits": True, "return_dict_in_generate": True}
        with attention_by(False):
            found = answer(self.model, prompt, STEPS, **more)
        return torch.stack(found.logits).cpu()

    def _outside(self) -> int:
        """Bytes of the device that are in use, and not by pages; 0 on a CPU."""
        if self.device != "cuda":
            return 0
        found = ballonet.stats()
        return -self._free() - sum(found.pages.values()) * found.page_size

    def _free(self) -> int:
        """Bytes of the device that nobody uses; 0 on a CPU."""
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def _forget(self) -> None:
        """Gives stock's memory back, as other peers need it."""
        if self.device == "cuda" and not self.is_managed:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def attention_by(cudnn: bool) -> Iterator[None]:
    """Within it torch may take cuDNN's attention, or not. Where pieces have turned it off it stays so."""
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(before and cudnn)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)
