"""Loads the models of a server, describes them to its endpoints, and chooses the page size for them from their
configurations (offload/policy/layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import AutoConfig, GenerationConfig

from ...allocator._native import Device
from ...allocator.config import Config
from ...allocator.device_choice import GRANULARITY, choose, page_size
from ...allocator.errors import BallonetError, ManageError, PoolExhausted
from ...allocator.units import format_size
from ...offload.policy.layout import Rounding, fitting
from ..compat import causal_model, keeps_requests_apart, longest_sequence
from ..weights.model_parts import bytes_of_weights
from .engine import Engine
from .rendering import Source, answer_template, tokenizer_of
from .requests import Defaults
from .served import Renderer, ServedModel, ends_of

_SMALLEST: Final = 2**16  # bytes of a page: driver calls are per page. Chosen


def parts_of(name: str) -> tuple[str, str]:
    """Splits a model's name into that of its repository or folder, and its revision."""
    if Path(name).exists():  # a folder has no revision, and may have an @ in its name
        return name, "main"
    repository, _, revision = name.partition("@")
    return repository, revision or "main"


def load(name: str, device: Device) -> Any:
    """Loads a model that can be batched continuously. ManageError, BallonetError, torch.OutOfMemoryError."""
    repository, revision = parts_of(name)
    where = f"cuda:{device.ordinal}" if device.kind == "cuda" else "cpu"
    try:
        config = AutoConfig.from_pretrained(repository, revision=revision)
        kind = causal_model(config)
        model = kind.from_pretrained(repository, revision=revision, dtype="auto", device_map=where)
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
    return load(name, device)


def config_of(source: Source) -> Any:
    """Reads a model's configuration. OSError, ValueError."""
    return AutoConfig.from_pretrained(source.name, revision=source.revision)


def source_of(name: str, *, own_templates: bool) -> Source:
    """Returns where a model's tokenizer is. `own_templates`: may clients send chat templates? ManageError, also for a
    model that takes more than text."""
    repository, revision = parts_of(name)
    try:
        config = config_of(Source(repository, revision))
        source = Source(repository, revision, config.model_type, own_templates)
        answer_template(source)  # what it imports takes most of a second: not while clients wait
    except Exception as error:  # any error: files and transformers may raise anything
        raise ManageError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if config.get_text_config(decoder=True) is not config:
        raise ManageError(f"{name} takes more than text, which this server does not: its part for text can be served")
    return source


def described(shown: str, engine: Engine, source: Source, renderer: Renderer, model: Any = None) -> ServedModel:
    """Describes a model to endpoints. `shown`: the name that clients ask for; `model`: it; None: its files say the
    same."""
    config = config_of(source) if model is None else model.config
    generation = generation_config_of(source, config) if model is None else model.generation_config
    longest, ends = longest_sequence(config) or None, ends_of(generation, tokenizer_of(source))
    return ServedModel(shown, engine, source, renderer, longest, config.vocab_size, ends, Defaults.of(generation))


def generation_config_of(source: Source, config: Any) -> GenerationConfig:
    """Reads a model's GenerationConfig; makes it from `config` where the model has none."""
    try:
        return GenerationConfig.from_pretrained(source.name, revision=source.revision)
    except OSError:  # it has none
        return GenerationConfig.from_model_config(config)


def chosen(names: Sequence[str], budget: int, kind: Literal["cuda", "standin"]) -> Rounding | None:
    """Returns the page size for models with these names or folders; None where one cannot be built without values."""
    usual = page_size(Config(), kind)
    try:
        sizes = [bytes_of_weights(AutoConfig.from_pretrained(name)) for name in names]
    except Exception:  # any error: loading the model will report it
        return None
    ranges = [nbytes for layers, rest in sizes for nbytes in (*layers, rest)]
    return fitting(ranges, len(names), budget, usual, max(GRANULARITY[kind], _SMALLEST))


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
