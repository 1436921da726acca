"""Statistics: pages by owner, bytes moved, and costs, in one consistent reading of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, TypeVar

from . import devices
from .events import Count
from .units import format_size, table

T = TypeVar("T")


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
    pending_free: int


@dataclass(frozen=True, slots=True, eq=False)
class Copied(_Counts):
    """Bytes moved between the device (d), the host (h) and the peer (p), by class and direction."""

    weights_h2d: int
    weights_d2h: int
    kv_h2d: int
    kv_d2h: int
    kv_p2d: int
    kv_d2p: int
    kv_p2h: int


@dataclass(frozen=True, slots=True)
class DriverSeconds:
    """Time spent in the driver's calls for page tables: by threads that needed pages, and off their path."""

    callers: float
    background: float


class _Fixed(Mapping[str, T]):
    """A mapping that cannot be changed."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, T]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> T:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


class Calls(_Fixed[int]):
    """How often each function of the driver was called. Cannot be changed."""


class Verbs(_Fixed[Count]):
    """Counts of decisions for one source. Cannot be changed."""


class Decisions(_Fixed[Verbs]):
    """Decisions, by source. Cannot be changed."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers taken at one moment."""

    page_size: int  # bytes
    budget: int  # bytes of device pages
    pages: Pages
    host_pages: int
    peer: str  # where pages of the peer are: "device 1", "second pool" (on the device itself), "" for no peer
    peer_budget: int  # bytes of pages of the peer
    peer_pages: int
    copied: Copied
    driver_calls: Calls
    faults: int  # injected ones that fired
    reclaimed: int  # pages that were taken from weights or caches because others needed them
    spilled: int  # host pages that replace device pages which an allocation did not find
    driver_seconds: DriverSeconds
    events: Decisions  # by source and verb

    @classmethod
    def of(cls, snapshot: Mapping[str, Any], events: Mapping[str, Mapping[str, Count]]) -> Self:
        """Makes them from `Device.snapshot()` and `Events.counts()`."""
        return cls(
            page_size=snapshot["page_size"],
            budget=snapshot["budget"],
            pages=Pages(**snapshot["pages"]),
            host_pages=snapshot["host_pages"],
            peer=snapshot["peer"],
            peer_budget=snapshot["peer_budget"],
            peer_pages=snapshot["peer_pages"],
            copied=Copied(**snapshot["copied"]),
            driver_calls=Calls(snapshot["driver_calls"]),
            faults=snapshot["faults"],
            reclaimed=snapshot["reclaimed"],
            spilled=snapshot["spilled"],
            driver_seconds=DriverSeconds(**{who: spent / 1e9 for who, spent in snapshot["driver_ns"].items()}),
            events=Decisions({source: Verbs(verbs) for source, verbs in events.items()}),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts and numbers, ready for JSON."""
        plain: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        plain |= {name: dict(plain[name]) for name in ("pages", "copied", "driver_calls")}
        plain["driver_seconds"] = asdict(self.driver_seconds)
        plain["events"] = {
            source: {verb: count._asdict() for verb, count in verbs.items()} for source, verbs in self.events.items()
        }
        return plain

    def __str__(self) -> str:
        """Returns several lines for people; all of the numbers are in `to_dict()`."""
        title, rows = self._shown()
        wide = max(len(row[0]) for row in rows)
        lines = [
            f"  {name:<{wide}}  {memory:>9}" + (f"  {count:,} pages" if count != "" else "")
            for name, count, memory in rows
        ]
        return "\n".join((title, *lines))

    def _repr_html_(self) -> str:
        """Returns the table that a notebook shows."""
        title, rows = self._shown()
        return table(title, ("owner", "pages", "memory"), rows)

    def _shown(self) -> tuple[str, list[tuple[str, int | str, str]]]:
        """Returns a title, and rows (what, pages, memory): pages by owner, copies, decisions."""
        rows: list[tuple[str, int | str, str]] = [
            (owner.replace("_", " "), pages, format_size(pages * self.page_size)) for owner, pages in self.pages.items()
        ]
        exist = sum(self.pages.values())
        rows.append(("all pages", exist, format_size(exist * self.page_size)))
        if self.host_pages:
            rows.append(("on the host", self.host_pages, format_size(self.host_pages * self.page_size)))
        if self.peer:
            rows.append((f"on the peer ({self.peer})", self.peer_pages, format_size(self.peer_pages * self.page_size)))
        if self.spilled:
            rows.append(("spilled there", self.spilled, format_size(self.spilled * self.page_size)))
        rows += [(f"copied: {name}", "", format_size(nbytes)) for name, nbytes in self.copied.items() if nbytes]
        rows += [
            (f"{source}, {verb}: {count.events} times", count.pages, format_size(count.pages * self.page_size))
            for source, verbs in self.events.items()
            for verb, count in verbs.items()
        ]
        of = f"of a budget of {format_size(self.budget)}, in pages of {format_size(self.page_size)}"
        return f"ballonet: {format_size(exist * self.page_size)} {of}", rows


def stats() -> Stats:
    """Returns pages by owner now, and copies, driver calls and decisions since `install()`. NotInstalled."""
    runtime = devices.of()
    runtime.events.hear()
    return Stats.of(runtime.device.snapshot(), runtime.events.counts())
