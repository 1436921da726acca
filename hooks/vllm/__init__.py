"""The KV cache of a vLLM engine in the pool, through vLLM's own KV connector: no part of vLLM is replaced.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BallonetConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ballonet.hooks.vllm", "kv_connector_extra_config": {"budget": "8GiB"}}'

The engine's cache is a reservation. A block has pages once the engine may hand it out, and gives them back when the
load has dropped. `python -m ballonet budget PID SIZE` changes the budget of the running engine. ImportError without
vLLM, UnsupportedVersion for a version that lacks names that the connector needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import BallonetConnector

__all__ = ["BallonetConnector"]


def __getattr__(name: str) -> Any:
    if name != "BallonetConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .seams import check

    check()
    from .connector import BallonetConnector

    return BallonetConnector
