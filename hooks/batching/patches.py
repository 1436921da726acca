"""Puts ballonet's parts in the place of those of transformers' continuous batching.

Note [What is replaced]
    A generation loop makes its cache, its scheduler and its offloading manager by names of one module of transformers.
    These names are replaced by functions that give a managed model ballonet's parts, and any other model stock's; so is
    the "sdpa" attention of all models, which is ballonet's in such a loop only (attention.py). The parameters that they
    rely on are checked first; where they differ, continuous batching stays stock, and a warning says why. With the last
    managed model everything is put back.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ...allocator.interrupts import Finalizer
from ...allocator.notices import warn
from ...allocator.patches import SharedPatch, Undo
from .batched import Batched

if TYPE_CHECKING:
    from .attention import Way

# (module, name, parameters that are relied on)
_NEEDED: Final = (
    ("cache", "PagedAttentionCache.__init__", ("config", "continuous_batching_config", "device", "dtype")),
    ("cache", "PagedAttentionCache.can_store_request_tokens", ("state", "request_len", "dry_run")),
    ("cache", "PagedAttentionCache.free_all_requests", ("clear_ledgers",)),
    ("cache", "PagedAttentionCache.evict_cached_blocks", ()),
    ("cache", "PagedAttentionCache.search_prefix_match", ("request_id", "prompt_ids")),
    ("cache", "PagedAttentionCache.mark_complete_blocks", ("state", "complete_blocks")),
    ("cache", "PagedAttentionCache.reset", ()),
    ("cache", "PagedAttentionCache.free_blocks", ("request_id", "no_cache")),
    ("cache", "PagedAttentionCache.prepare_fork_request", ("src_state", "dst_req_ids", "copy_src_and_dst")),
    ("cache", "PagedAttentionCache.perform_cache_copy", ("copy_src_and_dst",)),
    (
        "cache",
        "PagedAttentionCache.extend_read_and_write_indices",
        ("request_id", "past_length", "query_length", "read_index", "write_index"),
    ),
    (
        "cache",
        "PagedAttentionCache.update",
        ("key_states", "value_states", "layer_idx", "kwargs"),
    ),
    ("cache_allocators", "CachePool.__init__", ("num_sectors", "num_allocators", "num_reserved_sectors")),
    ("cache_allocators", "CachePool.allocate_sector", ("index",)),
    ("cache_allocators", "CachePool.try_to_free_sectors", ()),
    ("cache_allocators", "CacheAllocator.register_cache_tensor", ("bytes_per_sector", "cache_tensor", "pool")),
    ("cache_allocators", "CacheAllocator.needs_new_sectors", ("request_id", "past_length", "query_length")),
    ("cache_allocators.cache_allocator", "compute_block_hash", ("parent_hash", "tokens")),
    ("cache_allocators.cache_allocator", "BlockLedger.register_new_hash", ("block_id", "block_hash")),
    ("cache_allocators.cache_allocator", "BlockLedger.acquire", ("block_id",)),
    ("cache_allocators.cache_allocator", "BlockLedger.release", ("block_id",)),
    ("cache_allocators", "CacheAllocator.mark_complete_blocks", ("request_id", "token_ids")),
    ("scheduler", "Scheduler.__init__", ("cache", "safety_margin", "max_requests_per_batch")),
    ("scheduler", "Scheduler._process_candidates", ("candidates", "token_budget")),
    ("scheduler", "Scheduler._infer_request_tokens", ("state",)),
    ("scheduler", "Scheduler._schedule_request", ("state", "request_tokens", "token_budget")),
    ("offloading_manager", "OffloadingManager.__init__", ("cache", "scheduler")),
    ("offloading_manager", "OffloadingManager.offload_requests", ()),
    ("offloading_manager", "OffloadingManager.restore_scheduled_requests", ("requests_in_batch",)),
    ("model_runner", "ModelRunner.compute_batch", ("model", "batch_data")),
    ("model_runner", "ModelRunner._sample", ("scores", "output_ids")),
    ("input_outputs", "ContinuousBatchingIOs.prepare_batch_update", ()),
    ("input_outputs", "ContinuousBatchingIOs.get_cb_kwargs", ()),
    ("cb_logits_processors", "ContinuousBatchingLogitsProcessorList.check_kwargs", ("kwargs",)),
    ("continuous_api", "OutputRouter.deliver", ("output",)),
    ("continuous_api", "OutputRouter.deliver_batch", ("outputs",)),
    ("continuous_api", "OutputRouter.fail_and_deliver", ("state", "error")),
    ("input_outputs", "attn_mask_is_needed", ("config",)),
    ("continuous_api", "ContinuousBatchingManager._create_batch_processor", ()),
    ("continuous_api", "ContinuousBatchProcessor._generation_step", ("model",)),
    ("continuous_api", "ContinuousBatchProcessor.prepare_next_batch", ()),
    ("continuous_api", "ContinuousBatchProcessor._handle_request_error", ("error", "state")),
    ("continuous_api", "ContinuousBatchProcessor._update_tp_group_state", ()),
)


class _Thread(threading.local):
    """What this thread knows of the generation loop that it is making."""

    attached: Batched | None = None  # its model
    way: Way | None = None  # how it attends by request


_thread: Final = _Thread()


def attach(model: nn.Module, batched: Batched) -> Callable[[], object]:
    """Makes continuous batching of `model` elastic until the returned function is called, or the model is collected.
    `batched`: the facts of the model that its loops use."""
    if not hasattr(model, "generate_batch"):
        return lambda: None
    if (reason := why_stock()) is not None:
        warn(f"continuous batching stays transformers' own: {reason}")
        return lambda: None
    _attached.add(id(model), batched)
    return Finalizer(model, functools.partial(_detach, id(model)))


@functools.cache
def why_stock() -> str | None:
    """Returns why continuous batching cannot be elastic with this transformers; None where it can."""
    from importlib import import_module

    for module, name, parameters in _NEEDED:
        there: Any = None
        with suppress(ModuleNotFoundError):
            there = import_module(f"transformers.generation.continuous_batching.{module}")
        for part in name.split("."):
            there = getattr(there, part, None)
        if there is None:
            return f"transformers has no {name}"
        missing = set(parameters) - inspect.signature(there).parameters.keys()
        if missing:
            return f"{name} of transformers takes no {', '.join(sorted(missing))}"
    return None


def _replace() -> Iterator[Undo]:
    from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner, scheduler
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.utils import find_head_dim
    from transformers.modeling_utils import AttentionInterface

    from ..sampling import carried
    from . import steps
    from .attention import attending, choose_way
    from .cache import ElasticPagedCache
    from .memory import RequestMemory, memory_of, most_of
    from .scheduler import ElasticFIFO, ElasticPrefillFirst, ElasticScheduler

    manager, mapping = continuous_api.ContinuousBatchingManager, scheduler.SCHEDULER_MAPPING
    stock_create = manager._create_batch_processor

    @functools.wraps(stock_create)
    def create(self: Any) -> Any:
        before = _thread.attached, _thread.way
        _thread.attached, _thread.way = _attached.get(id(self.model)), None
        try:
            processor = stock_create(self)
        finally:
            _thread.attached, _thread.way = before
        if isinstance(processor.scheduler, ElasticScheduler):
            processor.scheduler.place.wake = self._wake_up_loop.set
        return processor

    def cache(**kwargs: Any) -> Any:
        model = _thread.attached
        if model is None:
            return PagedAttentionCache(**kwargs)
        config, settings, dtype = (kwargs[name] for name in ("config", "continuous_batching_config", "dtype"))
        _thread.way = way = choose_way(config, settings, kwargs["device"], dtype, find_head_dim(config))
        if way is not None:  # only now: each layer of each token of `generate()` would pay for it, too
            _attached.also("sdpa", lambda: _put(functions, "sdpa", attending(functions["sdpa"])))
        make = functools.partial(ElasticPagedCache, model=model, way=way, **kwargs)
        with torch.inference_mode(False):  # the loop runs in its caller's mode, and the next one may be another's
            return make() if model.loop_caches is None else model.loop_caches.take(settings, dtype, way, make)

    functions: dict[str, Any] = AttentionInterface._global_mapping

    def mask_is_needed(config: Any) -> bool:
        return _thread.way is None and stock_mask_is_needed(config)

    stock_mask_is_needed = vars(input_outputs)["attn_mask_is_needed"]

    stock_preemption = vars(continuous_api)["OffloadingManager"]

    def preemption(*, cache: Any, **kwargs: Any) -> Any:
        made = steps.PagePreemption if isinstance(cache, ElasticPagedCache) else stock_preemption
        return made(cache=cache, **kwargs)

    def scheduling(stock: Callable[..., Any], elastic: Callable[..., Any]) -> Callable[..., Any]:
        def make(cache: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(cache, ElasticPagedCache):
                return stock(cache, *args, **kwargs)
            tuning = cache.pages.client.manager.tuning.serving
            now, most = functools.partial(memory_of, cache.pages), functools.partial(most_of, cache.pages)
            others, memory = functools.partial(others_run, cache.model), RequestMemory(cache, now, most, tuning)
            return elastic(cache, *args, memory=memory, others=others, tuning=tuning, **kwargs)

        return make

    yield _put(continuous_api, "PagedAttentionCache", cache)
    yield _put(continuous_api, "OffloadingManager", preemption)
    yield _put(input_outputs, "attn_mask_is_needed", mask_is_needed)
    for name, elastic in (("fifo", ElasticFIFO), ("prefill_first", ElasticPrefillFirst)):
        yield _put(mapping, name, scheduling(mapping[name], elastic))
    processor = continuous_api.ContinuousBatchProcessor
    yield _put(manager, "_create_batch_processor", create)
    for owner, name, mine in (
        (processor, "_update_tp_group_state", steps.receive_requests),
        (processor, "prepare_next_batch", steps.prepare_step),
        (processor, "_generation_step", steps.compute_step),
        (model_runner.ModelRunner, "compute_batch", steps.launch_forward),
        (input_outputs.ContinuousBatchingIOs, "prepare_batch_update", carried.tell_tokens),
        (processor, "_handle_request_error", steps.fail_request),
    ):
        yield _put(owner, name, steps.in_place_of(vars(owner)[name], mine))
    sampled = steps.in_place_of(vars(model_runner.ModelRunner)["_sample"], carried.keep_logits)
    yield _put(model_runner.ModelRunner, "_sample", torch.compiler.disable(sampled))


def others_run(model: Batched) -> bool:
    """Do requests of other models on the device of this one run?"""
    return any(other.runs for other in _attached.users if other is not model and other.device is model.device)


def _put(owner: Any, name: str, mine: object) -> Undo:
    """Replaces a name of `owner`, a module, a class or a dictionary."""
    names = owner if isinstance(owner, dict) else vars(owner)
    stock = names[name]

    def put(value: object) -> None:
        if names is owner:
            owner[name] = value
        else:
            setattr(owner, name, value)

    put(mine)

    def put_back() -> None:
        if names.get(name) is mine:  # else it was replaced again since
            put(stock)

    return put_back


_attached: Final = SharedPatch[Batched](_replace)  # by the id of a live model


def _detach(key: int) -> None:
    known = _attached.get(key)
    if known is not None and known.loop_caches is not None:
        known.loop_caches.close()
    _attached.remove(key)


def batched(model: nn.Module) -> Batched | None:
    """Returns the facts that a model's generation loops use; None where they are stock's."""
    return _attached.get(id(model))
