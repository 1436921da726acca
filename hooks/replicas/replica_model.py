"""A replica's model as its stages use it: cache and forward of a span of layers, and the times of what it runs.

Note [A cache for a span]
    A block of a paged cache holds a few tokens in all layers of a kind. The cache of a stage is that of a model with
    the layers of the span alone, numbered from 0; so a token takes only the bytes of these layers, and the pages of a
    budget hold more tokens. Block tables are the stage's own: another stage may have given the same request other
    blocks. Another span needs another cache, as the geometry of blocks differs. Running requests are copied from the
    old cache to the new one (kv_exchange.py): memory traffic for the layers that stay, little beside the KV exchanged
    over links.

Note [One set of inputs]
    transformers allocates input tensors for the largest batch once. A stage needs one set, although several
    microbatches are in flight in the group: it computes them one after the other on one stream, which also orders the
    writes to the next inputs.

Note [Bubble]
    The bubble is the part of the stages' time in which they wait while their group has work: 1 - busy / open. A stage
    is busy from the first to the last operation of a microbatch's layers. A group of k stages with a microbatch in
    flight is open for k seconds in each second, which its first stage counts; so the time of links and sampling is
    bubble, too (as in the simulation, where links take no time). Groups of one replica count nothing.

Note [The clock of a GPU]
    Work is submitted long before it runs, so a time is taken as an event on the stream. It is converted to the host's
    clock by a reference event, recorded while the stream was idle, and the seconds on the device since then.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from ...allocator.errors import ManageError
from ...offload.policy.replicas.pipeline import ChunkCost
from ..batching.batched import Batched
from ..batching.cache import ElasticPagedCache
from ..batching.memory import memory_of, most_of
from ..batching.patches import batched
from ..forward.lease import GroupLease
from ..sampling.grammar import Grammars
from ..sampling.sampler import put
from ..splice.forms import States
from .microbatch_plan import Chunk, StageLink, logit_rows

Mark = Callable[[], float | None]  # seconds at which the device reached the mark; None: it has not yet


# Microbatches that the error of predictions is the mean of: some seconds of a replica. Chosen.
_JUDGED: Final = 64


class Ran(NamedTuple):
    """A microbatch that has run. `begin`, `end`: in seconds; `sizes`: (tokens before, new tokens) of its chunks;
    `layers`: number of layers that were computed."""

    begin: float
    end: float
    sizes: tuple[tuple[int, int], ...]
    layers: int


class StageTimes:
    """Measures microbatches. Used by one thread. `busy`, `open`: seconds, see Note [Bubble]."""

    def __init__(
        self,
        layers: int,
        cost: ChunkCost | None,
        clock: Callable[[], float],
        mark: Callable[[], Mark],
        on_ran: Callable[[Ran], object] = lambda ran: None,
    ) -> None:
        """`layers`: of the model; `cost`: predicts the seconds of a microbatch in all layers; `clock`: of the host, in
        seconds; `mark`: records a mark on the device; `on_ran`: called with each microbatch once its time is known."""
        self.busy = 0.0
        self.open = 0.0
        self._layers = layers
        self._cost = cost
        self._clock = clock
        self._mark = mark
        self._on_ran = on_ran
        self._errors: deque[float] = deque(maxlen=_JUDGED)
        self._running: deque[tuple[Mark, Mark, Sequence[Chunk], int]] = deque()
        self._since: tuple[float, int] | None = None  # (since when `open` is not counted yet, open stages)

    def begin(self) -> Mark:
        """Marks the begin of a microbatch, before it is submitted."""
        return self._mark()

    def end(self, began: Mark, chunks: Sequence[Chunk], layers: int) -> None:
        """Marks the end of a microbatch, after it is submitted."""
        self._running.append((began, self._mark(), chunks, layers))
        self.poll()

    def poll(self) -> None:
        """Takes in the microbatches that have run."""
        while self._running:
            begin, end, chunks, layers = self._running[0]
            ended, began = end(), begin()
            if ended is None or began is None:
                return
            self._running.popleft()
            sizes = tuple((chunk.before, len(chunk.ids)) for chunk in chunks)
            self.add(Ran(began, ended, sizes, layers))

    @property
    def all_timed(self) -> bool:
        """Whether the times of all submitted microbatches are known."""
        return not self._running

    def set_open_stages(self, stages: int) -> None:
        """Counts so many stages as open from now on: those of the group that this replica leads; 0: it has no work."""
        if self._since is None and stages < 2:
            return
        now = self._clock()
        if self._since is not None:
            since, before = self._since
            self.open += before * (now - since)
        self._since = (now, stages) if stages > 1 else None

    @property
    def error(self) -> float | None:
        """Mean relative error of the predicted seconds of the latest microbatches; None before the first."""
        return statistics.fmean(self._errors) if self._errors else None

    def add(self, ran: Ran) -> None:
        """Counts a microbatch that has run."""
        seconds = ran.end - ran.begin
        if ran.layers < self._layers:
            self.busy += seconds
        if self._cost is not None and seconds > 0:
            whole = self._cost.batch(ran.sizes)
            self._errors.append(abs(whole * ran.layers / self._layers / seconds - 1))
        self._on_ran(ran)


class HostTimeMarks:
    """Marks of a device that computes synchronously, the CPU."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def __call__(self) -> Mark:
        """Returns a mark with the present time."""
        now = self._clock()
        return lambda: now


class CudaTimeMarks:
    """Marks in the current stream of a GPU. See Note [The clock of a GPU]."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._reference: tuple[Any, float] | None = None

    def __call__(self) -> Mark:
        """Records a mark in the current stream."""
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event(enable_timing=True)
        if self._reference is None:
            stream.synchronize()
        if self._reference is None or stream.query():
            event.record(stream)
            self._reference = event, self._clock()
            at = self._reference[1]
            return lambda: at
        event.record(stream)
        before, at = self._reference

        def reached() -> float | None:
            return at + before.elapsed_time(event) / 1e3 if event.query() else None

        return reached


def marks_of(device: torch.device, clock: Callable[[], float] = time.monotonic) -> Callable[[], Mark]:
    """Returns a function that records marks on a device."""
    return CudaTimeMarks(device, clock) if device.type == "cuda" else HostTimeMarks(clock)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`batching`: the resolved ContinuousBatchingConfig; `helper`: transformers' distributed helper, for the cache;
    `processors`: its logit processors, for the inputs."""

    batching: Any
    helper: Any
    processors: Any

    @property
    def block(self) -> int:
        """Tokens of a block of KV."""
        return int(self.batching.page_size)

    @classmethod
    def of(cls, model: Any, max_batch_tokens: int, **batching: Any) -> Self:
        """Resolves the settings for a model, and sets its attention to a paged one. `max_batch_tokens`: new tokens of
        an iteration, the same on all stages; `batching`: other settings of ContinuousBatchingConfig. Blocks are not
        shared between requests, as stages would evict different ones; no CUDA graph is captured, as the forward of a
        stage ends in the middle of the model."""
        given = ContinuousBatchingConfig(
            **{
                **batching,
                "max_batch_tokens": max_batch_tokens,
                "allow_block_sharing": False,
                "use_cuda_graph": False,
                "use_async_batching": False,
            }
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=given)
        return cls(manager.continuous_batching_config, manager.distributed_helper, manager.logit_processor)


def config_of(config: Any, layers: range) -> Any:
    """Returns a copy of a decoder's configuration with these layers alone."""
    shorter = copy.copy(config)
    shorter.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        shorter.layer_types = [config.layer_types[layer] for layer in layers]
    return shorter


class SpanCache(ElasticPagedCache):
    """An ElasticPagedCache of the model's `layers`; `update` takes their indices in the model."""

    def __init__(self, model: Any, batched: Batched, layers: range, settings: GroupSettings) -> None:
        """`batched`: facts of the model (hooks/batching/patches.py). torch.OutOfMemoryError, DriverError."""
        self.layers = layers
        # a weak reference to a function that is called with each request whose blocks are freed
        self.on_freed: Callable[[], Callable[[str], object] | None] = lambda: None
        keeps = getattr(model, "_supports_logits_to_keep", None)
        super().__init__(
            config_of(model.config.get_text_config(), layers),
            settings.batching,
            model.device,
            settings.helper,
            model=replace(batched, loop_caches=None),
            dtype=model.dtype,
            model_supports_logits_to_keep=keeps is not None and keeps(),
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values as transformers' cache does. `layer_idx`: of the model, within the span."""
        stored: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states=key_states, value_states=value_states, layer_idx=layer_idx - self.layers.start, kwargs=kwargs
        )
        return stored

    def store(self, state: Any, tokens: int) -> bool:
        """Allocates blocks for so many more tokens of a request, on the host where the device has no page (reads are
        slower there). Returns False, and allocates none, where neither has room."""
        try:
            for on_host in (frozenset[str](), frozenset((state.request_id,))):
                self.on_host = on_host
                if self.can_store_request_tokens(state, tokens):
                    return True
            return False
        finally:
            self.on_host = frozenset()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees a request's blocks, and calls `on_freed`."""
        super().free_blocks(request_id, no_cache)
        if (on_freed := self.on_freed()) is not None:
            on_freed(request_id)

    def give(self, request: str) -> None:
        """Frees the blocks of a request, and the pages on which no other request has a block."""
        self.free_blocks(request)
        self.pool.try_to_free_sectors()

    @property
    def token_bytes(self) -> float:
        """Bytes of KV per token, in the layers of the span."""
        return self.bytes_per_sector / self.tokens_per_sector

    def count_blocks(self, request: str, layer: int) -> int:
        """Returns the number of blocks of a request's KV in a layer of the model. KeyError."""
        return len(self._blocks(request, layer))

    def read_blocks(self, request: str, layer: int, first: int, count: int) -> torch.Tensor:
        """Returns a copy of the blocks [first, first + count) of a request's KV in a layer of the model,
        [count, 2, tokens, heads, width]."""
        rows, index = self._rows(request, layer, first, count)
        with GroupLease(self.group), torch.no_grad():
            self.pages.client.uses()
            return rows[index]

    def write_blocks(self, request: str, layer: int, first: int, count: int, tensor: torch.Tensor) -> None:
        """Copies what `read_blocks` of another cache has returned to these blocks."""
        rows, index = self._rows(request, layer, first, count)
        with GroupLease(self.group), torch.no_grad():
            self.pages.client.uses()
            rows[index] = tensor.to(rows.device)

    @staticmethod
    def checksum(tensor: torch.Tensor) -> int:
        """Returns the sum of the 4-byte words of blocks, each weighted by its index, modulo 2**64. Computed on their
        device."""
        words = tensor.contiguous().view(torch.int32).flatten()
        weights = torch.arange(1, words.numel() + 1, device=words.device) * 2654435761 % 2**31
        return int((words * weights).sum())

    def _blocks(self, request: str, layer: int) -> list[int]:
        blocks: list[int] = self.layer_to_allocator[layer - self.layers.start].block_table[request]
        return blocks

    def _rows(self, request: str, layer: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all blocks of a layer, [blocks, 2, tokens, heads, width], and the indices of these of a request."""
        kind: Any = self.layer_to_allocator[layer - self.layers.start]
        shape = (-1, len(kind.layer_indices), 2, kind.tokens_per_page, kind.num_key_value_heads, kind.head_dim)
        index = torch.tensor(self._blocks(request, layer)[first : first + count], device=kind.cache_tensor.device)
        return kind.cache_tensor.view(shape)[:, kind.layer_indices.index(layer - self.layers.start)], index

    def blocks_for(self, start: int, end: int) -> int:
        """Returns the blocks that a request needs for its tokens [start, end), beyond those for earlier tokens."""
        size: int = self.block_tokens
        return -(-end // size) - -(-start // size)


class RunsLayers(Protocol):
    """Runs some layers of a model."""

    def __call__(self, layers: range, given: States | None, inputs: dict[str, Any]) -> States:
        """Runs these layers with the model's own forward. `inputs`: the forward's keyword arguments; `given`: the
        states before the first of these layers, None before the model's first. Returns the states after the last of
        them, or the logits [1, tokens, vocabulary] after the model's last."""


class SpanRunner:
    """Computes microbatches of `cache.layers`."""

    def __init__(
        self, model: Any, runs: RunsLayers, cache: SpanCache, settings: GroupSettings, times: StageTimes | None = None
    ) -> None:
        """`times`: measures the microbatches."""
        config = model.config.get_text_config()
        keeps = getattr(model, "_supports_logits_to_keep", None)
        self._keeps = keeps is not None and keeps()
        self._runs = runs
        self._cache = cache
        self._processors = settings.processors
        self._times = times
        self.last = cache.layers.stop == config.num_hidden_layers
        self._inputs = ContinuousBatchingIOs(
            cache, config_of(config, cache.layers), settings.batching, model.device, model.dtype, settings.processors
        )

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], states: Sequence[RequestState], given: States | None) -> States:
        """Computes chunks, whose requests have their blocks. `states`: of the requests, advanced by their chunks;
        `given`: the states from the stage before. Returns the states for the next stage, or on the last stage the
        logits [`logit_rows`, vocabulary]. torch.OutOfMemoryError."""
        began = None if self._times is None else self._times.begin()
        made = self._run(chunks, states, given)
        if self._times is not None and began is not None:
            self._times.end(began, chunks, len(self._cache.layers))
        return made

    def _run(self, chunks: Sequence[Chunk], states: Sequence[RequestState], given: States | None) -> States:
        batch = [_scheduled(chunk, state) for chunk, state in zip(chunks, states, strict=True)]
        fast = all(len(chunk.ids) == 1 and chunk.before < self._cache.max_decode_fast_path_length for chunk in chunks)
        new, read = sum(len(chunk.ids) for chunk in chunks), sum(chunk.before for chunk in chunks)
        self._inputs.prepare_batch_tensors(batch, self._processors, fast, new, read, use_padding=False)
        inputs: dict[str, Any] = dict(self._inputs.get_model_kwargs())
        if not self.last:
            return self._runs(self._cache.layers, given, inputs)
        indices = put(logit_rows(chunks), torch.int64, inputs["input_ids"].device)
        if self._keeps:
            inputs["logits_to_keep"] = indices
        (logits,) = self._runs(self._cache.layers, given, inputs)
        return (logits[0] if self._keeps else logits[0, indices],)


def _scheduled(chunk: Chunk, state: RequestState) -> FutureRequestState:
    assert state.position_offset == chunk.before, f"{chunk.request} has {state.position_offset} tokens"
    state.tokens_to_process = list(chunk.ids)
    return FutureRequestState(state, chunk.samples, {}, len(chunk.ids))


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """A managed model. `runs`: runs some of its layers; `times`: measures microbatches; None: they are not measured;
    `grammars`: of its tokens; without a tokenizer all are refused."""

    name: str
    model: Any
    runs: RunsLayers
    settings: GroupSettings
    times: StageTimes | None = None
    grammars: Grammars = field(default_factory=lambda: Grammars(None, (), 0))


@dataclass(frozen=True, slots=True)
class StageParts:
    """What a stage of a group works with. `before`, `after`: links to the neighbouring stages; after the last one comes
    the first. None: there is no other stage."""

    epoch: int
    cache: SpanCache
    runner: SpanRunner
    grammars: Grammars
    before: StageLink | None
    after: StageLink | None


def cache_of(member: ReplicaModel, layers: range) -> SpanCache:
    """Returns a new cache for these layers. ManageError where the model is not managed; torch.OutOfMemoryError."""
    known = batched(member.model)
    if known is None:
        raise ManageError(f"the model of replica {member.name} is not managed: call ballonet.manage first")
    return SpanCache(member.model, known, layers, member.settings)


def room_of(cache: SpanCache) -> int:
    """Returns the bytes that KV may take beyond the cache's present ones."""
    return memory_of(cache.pages).usable


def most_tokens(cache: SpanCache) -> int:
    """Returns the tokens of KV for which there would be memory if no request ran."""
    return int(most_of(cache.pages).usable / cache.token_bytes)


def runner_of(member: ReplicaModel, cache: SpanCache) -> SpanRunner:
    """Returns a runner for the layers of a cache."""
    return SpanRunner(member.model, member.runs, cache, member.settings, member.times)
