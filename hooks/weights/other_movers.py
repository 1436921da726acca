"""Refuses models whose weights another library moves, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...allocator.errors import ManageError


def refuse_what_moves_weights(model: nn.Module) -> None:
    """Raises ManageError where another library gives the weights of `model` other memory while it runs."""
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        if getattr(module, "_is_fsdp_managed_module", False):  # FSDP1 and fully_shard alike
            raise ManageError(
                f"{where} is sharded by FSDP, which gives its weights other memory in every forward: manage the model "
                "instead of sharding it, or leave it to FSDP"
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ManageError(
                f"{where} copies the model to {len(module.device_ids)} devices in every forward: manage the model "
                "inside (its `module`) and call that, or use one process per device with DistributedDataParallel"
            )
        if any(map(_offloads, _accelerate_hooks(module))):
            raise ManageError(
                f"{where} is offloaded by accelerate (a device_map with 'cpu' or 'disk', cpu_offload, disk_offload), "
                "which brings its weights in for each forward: load the model without offloading, or call "
                "accelerate.hooks.remove_hook_from_submodules(model) first"
            )


def _accelerate_hooks(module: nn.Module) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", () if hook is None else (hook,))  # a SequentialHook has several


def _offloads(hook: Any) -> bool:
    """Does the hook offload weights? AlignDevicesHook has an attribute for it; CpuOffload is known by its class."""
    return bool(getattr(hook, "offload", False)) or type(hook).__name__ == "CpuOffload"
