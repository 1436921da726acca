"""The KV cache of a vLLM engine in the pool, through vLLM's own KV connector: no part of vLLM is replaced.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BallonetConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ballonet.hooks.vllm", "kv_connector_extra_config": {"budget": "8GiB"}}'

The engine's cache is a reservation. A block has pages once the engine may hand it out, and gives them back when the
load has dropped. `ballonet budget PID SIZE` changes the budget of the running engine. ImportError without
vLLM, UnsupportedVersion for a version that lacks names that the connector needs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ...allocator.errors import UnsupportedVersion

if TYPE_CHECKING:
    from .connector import BallonetConnector

__all__ = ["BallonetConnector"]

_NAMES: Final = {  # by module
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        *("KVConnectorMetadata", "KVConnectorRole", "KVConnectorWorkerMetadata", "SupportsHMA"),
        *("KVConnectorBase_V1.get_mem_pool_context", "KVConnectorBase_V1.bind_gpu_block_pool"),
        *("KVConnectorBase_V1.on_new_request", "KVConnectorBase_V1.build_connector_worker_meta"),
        *("KVConnectorBase_V1.update_connector_output", "KVConnectorBase_V1.clear_connector_metadata"),
        *("KVConnectorBase_V1.has_pending_push_work", "KVConnectorBase_V1.handle_preemptions"),
    ),
    "vllm.v1.core.block_pool": ("BlockPool.evict_blocks", "BlockPool.get_num_free_blocks"),
    "vllm.v1.core.kv_cache_utils": (
        *("FreeKVCacheBlockQueue.remove", "FreeKVCacheBlockQueue.prepend_n"),
        "FreeKVCacheBlockQueue.get_all_free_blocks",
    ),
    "vllm.v1.worker.utils": ("allocate_kv_cache",),
}


def check() -> None:
    """Raises UnsupportedVersion with the missing names, ImportError without vLLM."""
    version = importlib.import_module("vllm").__version__
    if missing := [name for module, names in _NAMES.items() for name in _missing(module, names)]:
        raise UnsupportedVersion(
            f"vLLM {version} lacks {'; '.join(missing)}, which the connector stands on: use vLLM 0.32, or serve with "
            "`ballonet serve`"
        )


def _missing(module: str, names: tuple[str, ...]) -> Iterator[str]:
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("vllm"):
            raise  # another package is missing, for any version
        yield module
        return
    for name in names:
        there: Any = imported
        for part in name.split("."):
            there = getattr(there, part, None)
        if there is None:
            yield name
        elif name == "allocate_kv_cache" and "torch.zeros" not in inspect.getsource(there):
            yield "allocate_kv_cache that makes the cache by one torch.zeros"


def __getattr__(name: str) -> Any:
    if name != "BallonetConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check()
    from .connector import BallonetConnector

    return BallonetConnector
