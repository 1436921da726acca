"""Loading of a model that is to be served, by transformers' own server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.cli.serving.model_manager import ModelManager

from ...allocator._native import Device
from ...allocator.errors import BallonetError, ManageError, PoolExhausted


def manager_for(device: Device) -> ModelManager:
    """What loads models on a device, and keeps them."""
    place = f"cuda:{device.ordinal}" if device.kind == "cuda" else "cpu"
    return ModelManager(device=place, continuous_batching=True, model_timeout=-1)


def load(models: ModelManager, name: str) -> Any:
    """Loads a model that can be batched continuously. ManageError, BallonetError, torch.OutOfMemoryError."""
    try:
        model, _ = models.load_model_and_processor(models.process_model_name(name))
    except (BallonetError, PoolExhausted):
        raise
    except Exception as error:  # whatever files and transformers' loading may raise
        raise ManageError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(model, "init_continuous_batching"):
        raise ManageError(f"{name} is a {type(model).__name__}, which transformers cannot batch continuously")
    return model


def loaded(name: str, device: Device, say: Callable[[str], object]) -> Any:
    """Loads one model, and says so."""
    say(f"loading {name}")
    return load(manager_for(device), name)
