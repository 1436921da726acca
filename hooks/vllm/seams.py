"""What the connector stands on in vLLM, looked for when it is imported: a version that lacks any of it is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.worker import utils

from ...allocator.errors import UnsupportedVersion

_METHODS: Final[tuple[tuple[type[Any], tuple[str, ...]], ...]] = (
    (
        base.KVConnectorBase_V1,
        (
            *("get_mem_pool_context", "bind_gpu_block_pool", "on_new_request"),
            *("build_connector_worker_meta", "update_connector_output", "clear_connector_metadata"),
        ),
    ),
    (block_pool.BlockPool, ("evict_blocks", "get_num_free_blocks")),
    (kv_cache_utils.FreeKVCacheBlockQueue, ("remove", "prepend_n", "get_all_free_blocks")),
)


def check() -> None:
    """UnsupportedVersion where something is missing, with what."""
    missing = [f"{owner.__name__}.{name}" for owner, names in _METHODS for name in names if not hasattr(owner, name)]
    allocate: Callable[..., Any] | None = getattr(utils, "allocate_kv_cache", None)
    if allocate is None or "torch.zeros" not in inspect.getsource(allocate):
        missing.append("allocate_kv_cache, which makes the cache by one torch.zeros")
    if missing:
        raise UnsupportedVersion(
            f"vLLM {__version__} lacks {'; '.join(missing)}, which the connector stands on: use vLLM 0.32, or serve "
            "with `python -m ballonet serve`"
        )
