"""The options of `manage()`, in one table: each is a keyword of `manage()` and of `from_pretrained()`, a flag of `run`
and a variable of the environment. Imports no torch.

Note [Where an option comes from]
    A keyword or a flag that was given, else `BALLONET_` and the option's name in capitals, else the default. A keyword
    that has its default value counts as not given. The environment is read when a model is managed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, SupportsIndex

from ..allocator.config import parse_prefix_cache, parse_size, parse_time, variables
from ..allocator.errors import ConfigError, OptionError


def _interval(value: object, name: str) -> int | Literal["auto"] | None:
    text = value.strip().lower() if isinstance(value, str) else value
    if text in (None, "none"):
        return None
    if text == "auto":
        return "auto"
    number = int(text) if isinstance(text, str) and text.isdecimal() else text
    if type(number) is int and number >= 1:
        return number
    raise ConfigError(
        f"{name} is {value!r}: give a whole number from 1 (all layers stream) to the number of decoder layers, or "
        '"auto" (as few stream as the memory demands), or none (no layer streams)'
    )


def _slo(value: float | str | None, name: str) -> float | None:
    seconds = None if value is None else parse_time(value, name)
    if seconds == 0:
        raise ConfigError(f"{name} is {value!r}: nothing takes no time; give seconds, or a text such as '80ms'")
    return seconds


def _priority(value: object, name: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        return int(value)
    raise ConfigError(f"{name} is {value!r}: give a whole number; models with the lowest give pages first")


def _floor(value: SupportsIndex | str, name: str) -> int:
    return 0 if value in (0, "0") and type(value) is not bool else parse_size(value, name)


def _prefix_cache(value: SupportsIndex | str | bool | None, name: str) -> bool | int | None:
    return None if value is None else parse_prefix_cache(value, name)


def _prefix_dir(value: str | os.PathLike[str] | None, name: str) -> Path | None:
    return None if value is None else Path(value).expanduser()


def _prefix_dir_limit(value: SupportsIndex | str | None, name: str) -> int:
    return PREFIX_DIR_LIMIT if value is None else parse_size(value, name)


def _shared_budget(value: SupportsIndex | str | bool | None, name: str) -> int | bool | None:
    return None if value is None else parse_prefix_cache(value, name) or None


def _batches(value: object, name: str) -> str:
    if isinstance(value, str) and value.strip().lower() in ("fast", "full"):
        return value.strip().lower()
    raise ConfigError(f'{name} is {value!r}: give "fast" (the batch with the most tokens per second) or "full"')


def _pieces(value: object, name: str) -> Literal["auto"] | None:
    text = value.strip().lower() if isinstance(value, str) else value
    if text in (None, "none"):
        return None
    if text == "auto":
        return "auto"
    raise ConfigError(
        f'{name} is {value!r}: give "auto" (decode by CUDA graphs where that gives the same bits) or none'
    )


PREFIX_DIR_LIMIT: Final = 16 * 2**30  # bytes


def _row(parse: Callable[[Any, str], object], metavar: str, help: str, switch: bool = False) -> dict[str, Any]:
    """Makes a row of the table. `parse`: takes a keyword's value or a text, and its name for the message of a
    ConfigError. `switch`: the flag may stand alone, for True."""
    return {"parse": parse, "metavar": metavar, "help": help, "switch": switch}


@dataclass(frozen=True, slots=True)
class ManageOptions:
    """The options of a managed model, as `manage()` explains them. SLOs in seconds, `floor` and sizes in bytes."""

    interval: int | Literal["auto"] | None = field(
        default="auto",
        metadata=_row(
            _interval,
            "N",
            "of every N decoder layers the last streams; auto: as few as the memory demands, or as many as an SLO "
            "allows; none: no layer",
        ),
    )
    tpot_slo: float | None = field(
        default=None, metadata=_row(_slo, "TIME", "what a decode step may take, such as 80ms")
    )
    ttft_slo: float | None = field(default=None, metadata=_row(_slo, "TIME", "what a prefill may take, such as 2s"))
    priority: int = field(default=0, metadata=_row(_priority, "N", "models with the lowest give their pages first"))
    floor: int = field(
        default=0,
        metadata=_row(
            _floor, "SIZE", "device memory that a model's weights and caches keep, whoever is short, such as 2GiB"
        ),
    )
    prefix_cache: bool | int | None = field(
        default=None,
        metadata=_row(
            _prefix_cache,
            "SIZE",
            "keep what was computed, for prompts that begin with it; by default only where there is a folder",
            switch=True,
        ),
    )
    prefix_dir: Path | None = field(
        default=None,
        metadata=_row(_prefix_dir, "FOLDER", "and keep it for later processes too, in files of this folder"),
    )
    prefix_dir_limit: int = field(
        default=PREFIX_DIR_LIMIT,
        metadata=_row(_prefix_dir_limit, "SIZE", "bytes of files there, those that were used last; by default 16GiB"),
    )

    shared_budget: int | bool | None = field(
        default=None,
        metadata=_row(
            _shared_budget,
            "SIZE",
            "device memory that processes of this user share, such as 24GiB; on: what others share already",
        ),
    )
    batches: str = field(
        default="fast",
        metadata=_row(
            _batches,
            "WHICH",
            "of continuous batching: fast, those with the most tokens per second; full, as many requests as fit",
        ),
    )

    pieces: Literal["auto"] | None = field(
        default="auto",
        metadata=_row(
            _pieces, "WHICH", "auto: decode by pieces of CUDA graphs, to the same bits; none: every kernel is launched"
        ),
    )

    def __post_init__(self) -> None:
        if self.slo and self.interval != "auto":
            raise OptionError(
                f'interval is {self.interval!r}, which leaves no choice to an SLO: give "auto", or no SLO (neither '
                "tpot_slo nor ttft_slo, nor BALLONET_TPOT_SLO nor BALLONET_TTFT_SLO)"
            )

    @property
    def slo(self) -> bool:
        """Is there any SLO?"""
        return self.tpot_slo is not None or self.ttft_slo is not None

    @property
    def kept_prefixes(self) -> bool | int:
        """Whether prefixes are kept, or the bytes of pages that they may take; by default if there is a folder."""
        return self.prefix_dir is not None if self.prefix_cache is None else self.prefix_cache

    @classmethod
    def of(cls, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Self:
        """Makes options of `given`, parsed ones, over those of the environment. OptionError names the variable."""
        texts = variables((option.variable for option in OPTIONS), environ)
        said = {
            option.name: _parsed(option, texts[option.variable], option.variable)
            for option in OPTIONS
            if option.variable in texts
        }
        return cls(**{**said, **given})


class Option(NamedTuple):
    """A row of the table."""

    name: str  # the keyword
    variable: str  # the environment variable
    flag: str  # the flag of `ballonet run`
    metavar: str
    help: str
    default: Any
    parse: Callable[[Any, str], Any]
    switch: bool


OPTIONS: Final = tuple(
    Option(
        option.name,
        f"BALLONET_{option.name.upper()}",
        f"--{option.name.replace('_', '-')}",
        default=option.default,
        **option.metadata,
    )
    for option in fields(ManageOptions)
)


def given(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options among `keywords` that differ from their defaults, parsed. OptionError."""
    values = {
        option.name: _parsed(option, keywords[option.name], option.name)
        for option in OPTIONS
        if option.name in keywords
    }
    return {
        option.name: values[option.name]
        for option in OPTIONS
        if option.name in values and values[option.name] != option.default
    }


def check_known(names: Mapping[str, object], function: str) -> None:
    """Raises OptionError where a keyword of `function` is no option."""
    if names:
        asked, *known = ", ".join(map(repr, names)), *(repr(option.name) for option in OPTIONS)
        raise OptionError(f"{function}() has no option {asked}: it takes {', '.join(known[:-1])} and {known[-1]}")


def _parsed(option: Option, value: object, name: str) -> Any:
    try:
        return option.parse(value, name)
    except ConfigError as error:
        raise OptionError(str(error)) from None
