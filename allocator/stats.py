"""Who owns which page, what moved, and what it cost: one consistent reading of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from . import runtime
from .display import table
from .units import format_size


class _Counts(Mapping[str, int]):
    """Named ints that are read as attributes (`pages.kv`) or as a mapping (`pages["kv"]`)."""

    __slots__ = ()

    def __getitem__(self, key: str) -> int:
        if key not in self.__dataclass_fields__:  # type: ignore[attr-defined]
            raise KeyError(key)
        value: int = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class Pages(_Counts):
    """Device pages by owner. Their sum is the number of pages that exist."""

    free: int
    weights: int
    activations: int
    kv: int
    retiring: int


@dataclass(frozen=True, slots=True, eq=False)
class Copied(_Counts):
    """Bytes moved between host and device, by class and direction."""

    weights_h2d: int
    weights_d2h: int
    kv_h2d: int
    kv_d2h: int


class Calls(Mapping[str, int]):
    """How often each function of the driver was called. Cannot be changed."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)

    def __getitem__(self, key: str) -> int:
        return self._counts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        return f"Calls({self._counts!r})"


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers taken at one moment."""

    page_size: int  # bytes
    budget: int  # bytes of device pages
    pages: Pages
    host_pages: int
    copied: Copied
    driver_calls: Calls
    faults: int  # injected ones that fired
    reclaimed: int  # pages that were taken from weights or caches because others needed them

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> Self:
        """From `Device.snapshot()`."""
        return cls(
            page_size=snapshot["page_size"],
            budget=snapshot["budget"],
            pages=Pages(**snapshot["pages"]),
            host_pages=snapshot["host_pages"],
            copied=Copied(**snapshot["copied"]),
            driver_calls=Calls(snapshot["driver_calls"]),
            faults=snapshot["faults"],
            reclaimed=snapshot["reclaimed"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and ints, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def _repr_html_(self) -> str:
        """What a notebook shows: who owns how much, and what was copied."""
        rows: list[tuple[str, int | str, str]] = [
            (owner, pages, format_size(pages * self.page_size)) for owner, pages in self.pages.items()
        ]
        exist = sum(self.pages.values())
        rows.append(("all pages", exist, format_size(exist * self.page_size)))
        if self.host_pages:
            rows.append(("on the host", self.host_pages, format_size(self.host_pages * self.page_size)))
        rows += [(f"copied: {name}", "", format_size(nbytes)) for name, nbytes in self.copied.items() if nbytes]
        title = f"ballonet: {format_size(exist * self.page_size)} of a budget of {format_size(self.budget)}"
        return table(title, ("owner", "pages", "memory"), rows)


def stats() -> Stats:
    """Who owns which page now, what was copied and what the driver was asked for since `install()`. NotInstalled."""
    return Stats.of(runtime.require().snapshot())
