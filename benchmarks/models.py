"""The models that are measured, Llama shapes with random weights, and what is done with them: a cache that is already
long, a `generate()` timed token by token, a limit to the memory that a peer may use.

Managed peers
    resident        nothing streams
    interval N      managed with `interval=N`: the last of every N layers streams

Peers that may use so many bytes of the device and no more: on a GPU stock is torch's own allocator, held to the budget
by `torch.cuda.set_per_process_memory_fraction`. A CPU's has no such limit, so there stock is the model as it is, with
stock's cache, in a pool of that budget in which nothing gives way: unmanaged, and without pages of the host. Both raise
`torch.OutOfMemoryError` at the budget.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from harness import GIB, MIB, Functions, Options
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, StoppingCriteria

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Transfer
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.compat import cache_name

PAGE_CALLS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync")
COPIES = 4  # that the link is measured by
STOCK, OURS = "stock", "ballonet"
LAYERS = {"cuda": 32, "cpu": 16, "tiny": 4}  # of what `few` gives: on a GPU that is the whole 8B shape
LINK = {"BALLONET_LINK": "2GB/s"}  # of the stand-in: to copy a layer of the 135M shape takes longer than to compute it
WARM = 3  # tokens before the first that is timed: the first pass fills the slots


def sized(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int, **more: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        **more,
    )


EIGHT_B = sized(4096, 14336, 32, 32, 8, 128256, 131072, tie_word_embeddings=False)
SMALL = sized(576, 1536, 30, 9, 3, 49152, 32768)  # that of SmolLM2-135M
TINY = sized(64, 96, 2, 4, 2, 199, 1024)
LARGER = sized(256, 1024, 6, 4, 2, 199, 32768)  # the smallest whose layers can stream: a matrix of each is 1 MiB
LARGER_HALF = sized(256, 2048, 6, 4, 2, 199, 32768)  # the same in bfloat16


def shape(chosen: Options) -> LlamaConfig:
    """What is measured here: the largest that the kind of device can do in minutes."""
    return TINY if chosen.tiny else EIGHT_B if chosen.cuda else SMALL


def streamable(chosen: Options) -> LlamaConfig:
    """The same with layers that can stream."""
    return shape(chosen) if not chosen.tiny else LARGER_HALF if chosen.cuda else LARGER


def few(chosen: Options, layers: int) -> LlamaConfig:
    """Returns so many layers of the 8B shape on a GPU, elsewhere of the smallest that can stream."""
    config = copy.deepcopy(EIGHT_B if chosen.cuda and not chosen.tiny else LARGER)
    config.num_hidden_layers = layers
    return config


def build(config: LlamaConfig, device: str) -> PreTrainedModel:
    """The model, made on the device: bfloat16 on a GPU, float32 on a CPU. Seeded, so that peers have the same one."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def filled(peer: str, config: Any, batch: int, tokens: int, device: str) -> DynamicCache:
    """A cache of random keys and values for so many tokens, the peer's own kind. A prefill would give it in minutes."""
    elastic = peer == OURS
    cache = ballonet.KVCache(config=config, max_length=2 * tokens) if elastic else DynamicCache(config=config)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    head = config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        states = torch.randn(batch, config.num_key_value_heads, tokens, head, dtype=dtype, device=device)
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)
    return cache


def describe(chosen: Options) -> str:
    """The model of models.py that is measured, in words, for a title."""
    return "tiny Llama" if chosen.tiny else "8B Llama shape, bfloat16" if chosen.cuda else "135M Llama shape, float32"


def describe_few(chosen: Options, layers: int) -> str:
    """The same of what `models.few` gives."""
    shape = "8B Llama shape, bfloat16" if chosen.cuda and not chosen.tiny else "smallest shape that streams, float32"
    return f"{layers} layers of the {shape}"


def page_size(chosen: Options) -> int | None:
    """Bytes; on the stand-in small, as models are."""
    return None if chosen.cuda else 2**16 if chosen.tiny else 2**18


def layer_page_size(chosen: Options) -> int | None:
    """Bytes, where layers stream; tiny layers have small pages on the stand-in."""
    return 65536 if chosen.tiny and not chosen.cuda else None


def unlimited(chosen: Options) -> int:
    """Bytes of a budget that is never met."""
    return 64 * GIB if chosen.cuda else 2 * GIB


def what(chosen: Options) -> str:
    """The model that `Held` has, in words, for a title; on a CPU also what stock is."""
    text = describe_few(chosen, LAYERS[chosen.kind])
    return text if chosen.cuda else f"{text}; stock in a plain pool of that budget"


def interval_of(peer: str) -> int | None:
    """The interval of a managed peer, None where nothing streams."""
    return int(peer.removeprefix("interval ")) if peer.startswith("interval ") else None


def is_managed(peer: str) -> bool:
    return peer == "resident" or interval_of(peer) is not None


def environment(chosen: Options) -> Mapping[str, str]:
    """What a peer's process is given: the stand-in's copies are as slow as a link."""
    return {} if chosen.cuda else LINK


def titled(chosen: Options, title: str) -> str:
    """The title of what is measured over the link."""
    return title if chosen.cuda else f"{title}, link of the stand-in slowed to 2 GB/s"


def seconds(device: str, work: Callable[[], object]) -> float:
    """Wall time of `work` with everything that it submits to the device."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: str) -> None:
    """Waits for the device; there is nothing to wait for on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(chosen: Options) -> Callable[[], float]:
    """What measures bytes per second that the link gives large copies, the yardstick of what streams: by torch, from
    pinned memory; on the stand-in by its own copies, which are as slow as it was told."""
    nbytes = (16 if chosen.tiny else 256) * MIB
    copy = pinned(nbytes) if chosen.cuda else paged(nbytes)
    return lambda: COPIES * nbytes / seconds(chosen.device, copy)


def pinned(nbytes: int) -> Callable[[], object]:
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return lambda: [target.copy_(source, non_blocking=True) for _ in range(COPIES)]


def paged(nbytes: int) -> Callable[[], object]:
    if devices.current() is None:
        ballonet.install(2 * nbytes, host_budget=2 * nbytes)
    device = devices.require()
    source, target = (device.reserve(nbytes, "weights", device.group()) for _ in range(2))
    source.map_host(0, source.pieces)
    target.map(0, target.pieces)
    transfer = Transfer(device)

    def copy() -> None:
        parts = [(target.address, source.address, nbytes)]
        done = [transfer.copy(parts, after=0, owner="weights", to="device") for _ in range(COPIES)]
        done[-1].wait()

    return copy


def or_link(functions: Callable[[str, Options], Functions]) -> Callable[[str, Options], Functions]:
    """The functions of peers, with one more peer, "link": large copies from pinned memory to the device, and nothing
    else."""
    return lambda name, chosen: (
        {"about": dict, "link": bandwidth(chosen)} if name == "link" else functions(name, chosen)
    )


class Clock(StoppingCriteria):
    """Never stops anything; notes the time, and a count, after each token: `times` when the device has computed it,
    `submitted` when the host was through with it."""

    def __init__(self, device: str, count: Callable[[], int] = int, wait: Callable[[str], None] = synchronize) -> None:
        """`wait`: until what was submitted to the device is done."""
        self.times: list[float] = []
        self.submitted: list[float] = []
        self.counts: list[int] = []
        self._device = device
        self._wait = wait
        self._count = count

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.note()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self) -> None:
        self.submitted.append(time.perf_counter())
        self._wait(self._device)
        self.times.append(time.perf_counter())
        self.counts.append(self._count())

    def gaps(self, warm: int = 0) -> list[float]:
        """ms between tokens, without the first ones."""
        return [(b - a) * 1e3 for a, b in pairwise(self.times[warm:])]

    def ms(self, warm: int = 0) -> float:
        """ms per token: the median."""
        return median(self.gaps(warm))

    def host_ms(self, warm: int = 0) -> float:
        """ms until the host was through with a token, from when the one before was computed: the median."""
        pairs = zip(self.times[warm:], self.submitted[warm + 1 :], strict=False)
        return median((submitted - before) * 1e3 for before, submitted in pairs)


def words(model: PreTrainedModel, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Random tokens, int64[sequences, tokens], on the CPU."""
    return torch.randint(1, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def said(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: int, device: str, **more: Any
) -> tuple[Clock, list[int]]:
    """What follows a prompt of one sequence, and a clock whose first time is that of the beginning."""
    ids, clock = prompt.to(device), Clock(device)
    clock.note()
    output = answer(model, ids, tokens, clock, **more)
    return clock, output[0, prompt.shape[1] :].tolist()


def timed(
    model: PreTrainedModel,
    cache: DynamicCache,
    size: tuple[int, int],
    device: str,
    tokens: int,
    clock: Clock,
    padding: int = 0,
) -> Clock:
    """Generates so many tokens. `size`: sequences, and tokens of each in the cache; `device`: where they are computed,
    wherever weights are meanwhile; `padding`: tokens of the first sequence that do not count."""
    batch, held = size
    prompt = torch.randint(0, model.config.vocab_size, (batch, held + 1), device=device)
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    answer(model, prompt, tokens, clock, attention_mask=mask, **{cache_name(model): cache})
    if len(clock.times) != tokens:
        raise RuntimeError(f"generate() stopped after {len(clock.times)} of {tokens} tokens")
    return clock


def answer(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, clock: Clock | None = None, **more: Any) -> Any:
    """What a greedy `generate()` returns for a prompt, which has no padding unless `more` has a mask."""
    return model.generate(
        prompt,
        max_new_tokens=tokens,
        do_sample=False,
        **({} if clock is None else {"stopping_criteria": [clock]}),
        **{"attention_mask": torch.ones_like(prompt), **more},
    )


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
            now = devices.require().snapshot()
            return now["page_size"] * sum(now["pages"].values()), now["physical_peak"]
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
    pages: dict[str, int] = {}
    for source, verbs in ballonet.stats().events.items():
        for verb in ("reclaim", "yield"):
            count = verbs[verb].pages if verb in verbs else 0
            if before is not None and source in before.events and verb in before.events[source]:
                count -= before.events[source][verb].pages
            pages[source] = pages.get(source, 0) + count
    return ", ".join(f"{source} {count}" for source, count in pages.items() if count)
