"""Loads the models of a server, by transformers' own ModelManager, and chooses the page size for them from their
configurations (offload/policy/layout.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import HTTPException
from transformers import AutoConfig
from transformers.cli.serving.model_manager import ModelManager

from ...allocator._native import Device
from ...allocator.config import Config
from ...allocator.device_choice import GRANULARITY, choose, page_size
from ...allocator.errors import BallonetError, ManageError, PoolExhausted
from ...allocator.units import format_size
from ...offload.policy.layout import Rounding, fitting
from ...offload.policy.tuning import DEFAULT
from ..compat import keeps_requests_apart
from ..weights.model_parts import bytes_of_weights


class Models(ModelManager):
    """A ModelManager that lists and loads only the models that the server was started with."""

    def __init__(self, names: Iterable[str], device: str) -> None:
        """`names`: of the models, on the hub or folders; `device`: torch's name."""
        self._names = tuple(self.process_model_name(name) for name in names)
        self._began = int(time.time())
        super().__init__(device=device, model_timeout=-1)

    @property
    def served(self) -> list[str]:
        """The names that clients ask for."""
        return sorted(name.removesuffix("@main") for name in self._names)

    def check(self, name: str) -> None:
        """Raises HTTPException where no model of that name is served."""
        if self.process_model_name(name) not in self._names:
            raise HTTPException(404, f"no model {name!r} here: {', '.join(self.served)}")

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """Lists the served models, in OpenAI's format."""
        return [{"id": name, "object": "model", "created": self._began, "owned_by": "ballonet"} for name in self.served]

    get_gen_models = list_models  # its name in transformers 5.23

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a served model and its processor. HTTPException where no such model is served."""
        self.check(model_id_and_revision)
        return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)


def parts_of(name: str) -> tuple[str, str]:
    """Splits a model's name, as a ModelManager has it, into that of its repository or folder, and its revision."""
    if Path(name).exists():  # a folder has no revision, and may have an @ in its name
        return name, "main"
    repository, _, revision = name.partition("@")
    return repository, revision or "main"


def models_on(device: Device, names: Iterable[str]) -> Models:
    """Makes the ModelManager of a device."""
    return Models(names, f"cuda:{device.ordinal}" if device.kind == "cuda" else "cpu")


def load(models: Models, name: str) -> Any:
    """Loads a model that can be batched continuously. ManageError, BallonetError, torch.OutOfMemoryError."""
    try:
        model, _ = models.load_model_and_processor(models.process_model_name(name))
    except (BallonetError, PoolExhausted):
        raise
    except Exception as error:  # any error: files and transformers may raise anything
        raise ManageError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not keeps_requests_apart(model):
        raise ManageError(f"{name} is a {type(model).__name__}, which transformers cannot batch continuously")
    return model


def loaded(name: str, device: Device, say: Callable[[str], object]) -> Any:
    """Loads one model, and reports that to `say`."""
    say(f"loading {name}")
    return load(models_on(device, [name]), name)


def chosen(names: Sequence[str], budget: int, kind: Literal["cuda", "standin"]) -> Rounding | None:
    """Returns the page size for models with these names or folders; None where one cannot be built without values."""
    usual, tuning = page_size(Config(), kind), DEFAULT.serving
    try:
        sizes = [bytes_of_weights(AutoConfig.from_pretrained(name)) for name in names]
    except Exception:  # any error: loading the model will report it
        return None
    ranges = [nbytes for layers, rest in sizes for nbytes in (*layers, rest)]
    return fitting(ranges, len(names), budget, usual, max(GRANULARITY[kind], tuning.smallest_page))


def suitable(names: Sequence[str], budget: int | str | None, say: Callable[[str], object]) -> int | None:
    """Returns the page size that suits these models in a budget that is given, where nobody chose one; None: the usual
    one. `say`: prints a line about what is lost. ConfigError."""
    settings = Config.from_env().merge(budget=budget)
    if settings.budget is None or settings.page_size is not None:
        return None
    found = chosen(names, settings.budget, choose(settings, torch.cuda.is_available()).kind)
    if found is None:
        return None
    lost = f"rounding to pages of {format_size(found.page)} takes {format_size(found.lost)}, {found.share:.1%} of what"
    say(f"{lost} the weights leave" + (": a larger budget would gain more" if found.share > found.most else ""))
    return found.page
