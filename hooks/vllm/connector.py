"""The connector, whose methods vLLM calls in the scheduler's process and in each worker's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from ...allocator.config import Config
from ...allocator.errors import ConfigError
from ..batching.pages import RESERVED
from ..options import ManageOptions, given
from .cache import BlockGate, EngineCache, Reserving

logger = init_logger("vllm.ballonet")
OPTIONS = ("budget", "page_size", "host_budget", "keep_prefixes", "shared_budget")


@dataclass
class Changes(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to the workers: a numbered request for blocks to open, and blocks that lose their pages.
    `idle`: there is no request."""

    number: int
    open: tuple[int, ...]
    close: tuple[int, ...]
    idle: bool


@dataclass
class Opened(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker's answer to the request of that number. `limit`: blocks that the budget has pages for; `away`: blocks
    whose pages are on the host."""

    number: int
    blocks: frozenset[int]
    limit: int
    away: frozenset[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Joins the answers of two workers: what holds for both."""
        assert isinstance(other, Opened)
        limit = min(self.limit, other.limit)
        return Opened(self.number, self.blocks & other.blocks, limit, self.away | other.away)


@dataclass
class _Scheduling:
    """The state of the scheduler's side."""

    block: int  # tokens
    step: int  # tokens of a step at most
    together: int  # requests of a step at most
    kinds: int  # groups of layers with separate blocks
    keep_prefixes: bool
    gate: BlockGate | None = None
    limit: int = RESERVED
    away: frozenset[int] = frozenset()
    requests: dict[str, Any] = field(default_factory=dict)
    said: bool = False  # was the user told that memory is too small for the waiting requests?

    @property
    def need(self) -> int:
        """Free blocks that the requests of the next two steps may ask for."""
        if not self.requests:
            return 0
        tokens: int = sum(
            max(1, request.num_tokens - request.num_computed_tokens) for request in self.requests.values()
        )
        most = -(-min(tokens, self.step) // self.block) + min(len(self.requests), self.together)
        return 2 * most * self.kinds


class BallonetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A vLLM connector that puts the KV cache into the pool, with pages under the blocks of requests, and a few ahead.

    Options (`kv_connector_extra_config`): `budget`, `page_size` and `host_budget`, as of `ballonet.install`, for KV
    alone; `keep_prefixes`: blocks that hold prefixes of past requests keep their pages in an idle engine (false);
    `shared_budget`: a size, or true for what others share: engines and other processes of this user have it together.
    ConfigError for another option.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if unknown := options.keys() - set(OPTIONS):
            raise ConfigError(f"{', '.join(sorted(unknown))}: no option of the connector; it has {', '.join(OPTIONS)}")
        keep = bool(options.pop("keep_prefixes", False))
        share = ManageOptions.of(given({"shared_budget": options.pop("shared_budget", None)})).shared_budget
        self._cache: EngineCache | None = None
        self._answer: Opened | None = None
        self._idle = False
        if role == KVConnectorRole.WORKER:
            settings = Config.from_env().merge(**options)
            tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
            size = tensors[0].size
            if size % blocks or any(tensor.host_resident for tensor in tensors):
                raise ConfigError(
                    "vLLM keeps some of this model's KV on the host itself: serve it without the connector"
                )
            name = vllm_config.model_config.model
            self._cache = EngineCache(settings, blocks, size // blocks, _parts(tensors), name, share)
            return
        scheduling = vllm_config.scheduler_config
        self._plan = _Scheduling(
            vllm_config.cache_config.block_size,
            scheduling.max_num_batched_tokens,
            scheduling.max_num_seqs,
            max(1, len(kv_cache_config.kv_cache_groups)),
            keep,
        )

    # -- a worker

    def get_mem_pool_context(self) -> Reserving | None:
        """Has vLLM make its cache in the pool: see cache.py, Note [Beside vLLM's own memory]."""
        return None if self._cache is None else Reserving(self._cache)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Opens and closes the scheduler's blocks before a step, and keeps pages in place. vLLM calls it first in every
        step, but `start_load_kv` after the forward where nothing is loaded."""
        cache, changes = self._cache, kv_connector_metadata
        assert cache is not None
        assert isinstance(changes, Changes)
        self._idle = changes.idle
        cache.close(changes.close)
        cache.begin()
        opened = frozenset(cache.open(changes.open))
        self._answer = Opened(changes.number, opened, cache.limit, cache.away)

    def clear_connector_metadata(self) -> None:
        """Ends a step."""
        super().clear_connector_metadata()
        if self._cache is not None:
            self._cache.end(self._idle)

    def build_connector_worker_meta(self) -> Opened | None:
        """Returns the blocks that were opened in this step."""
        return self._answer

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: nothing is saved."""

    def wait_for_save(self) -> None:
        """Does nothing: nothing is saved."""

    def shutdown(self) -> None:
        """Closes the cache when the engine ends."""
        if self._cache is not None:
            self._cache.shut()

    # -- the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Closes all blocks that have no pages yet."""
        self._plan.gate = BlockGate(gpu_block_pool, RESERVED)

    def on_new_request(self, request: Any) -> None:
        """Notes a request that will need blocks."""
        self._plan.requests[request.request_id] = request

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns that the blocks of the request may be freed at once."""
        self._plan.requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request as `request_finished` does."""
        return self.request_finished(request, [])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns 0 tokens: nothing comes from outside."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Does nothing: nothing comes from outside."""

    def build_connector_meta(self, scheduler_output: Any) -> Changes:
        """Returns the blocks to open and close before this step: see cache.py, Note [Only what has pages]."""
        plan, gate = self._plan, self._plan.gate
        assert gate is not None
        need = plan.need
        closed = gate.close(2 * need, plan.limit, RESERVED, not need and not plan.keep_prefixes, plan.away)
        stuck = plan.requests and not scheduler_output.total_num_scheduled_tokens and gate.open >= plan.limit > RESERVED
        if stuck and not plan.said:
            plan.said = True
            logger.warning(
                "no request can run: the budget has pages for %d blocks of %d tokens; raise it with `ballonet budget`",
                plan.limit,
                plan.block,
            )
        return Changes(*gate.ask(need, plan.limit), closed, not plan.requests)

    def has_pending_push_work(self) -> bool:
        """Should one more step run without a request? True while an idle engine has pages to give."""
        plan, gate = self._plan, self._plan.gate
        return gate is not None and not plan.requests and gate.gives(RESERVED, not plan.keep_prefixes)

    def update_connector_output(self, connector_output: Any) -> None:
        """Opens the blocks that the workers have backed."""
        answer, gate = connector_output.kv_connector_worker_meta, self._plan.gate
        if isinstance(answer, Opened) and gate is not None:
            self._plan.limit, self._plan.away = answer.limit, answer.away
            gate.answered(answer.number, answer.blocks)


def _parts(tensors: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Returns where the bytes of a block lie in the cache, as (offset, stride, bytes): one part where blocks are the
    outermost dimension, else one for each layer. Groups of layers that share memory are counted once."""
    parts: set[tuple[int, int, int]] = set()
    for tensor in tensors:
        layers = range(len(tensor.layers))
        if tensor.block_stride >= tensor.layer_stride * len(layers):
            parts.add((0, tensor.block_stride, tensor.block_stride))
        else:
            parts.update(
                (tensor.offset + n * tensor.layer_stride, tensor.block_stride, tensor.block_stride) for n in layers
            )
    return sorted(parts)
