"""The report of a managed model, `Managed.report()`: where its weights are, and what streaming costs and gives.

Numbers in, a frozen report out; nothing is asked of a device here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from ...allocator.units import format_size, format_time, table
from ...offload.manager.kv_read_plan import Streamed
from ...offload.policy.kv_pages import Way
from ...offload.policy.lending import Lent
from ...offload.policy.plan import Costs, Plan
from ...offload.policy.schedule import every, gaps
from ...offload.record.record import PHASES, Phase
from ..options import ManageOptions
from .pace import Measured

NO_LOANS: Final = Lent()
DEFAULTS: Final = ManageOptions()
NAMES: Final[Mapping[Phase, str]] = {"prefill": "prefill", "decode": "token"}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of an iteration; None where it is not known. `resident`: with no layer streamed, as a rule from the
    performance record. `predicted`, and its stall: from that, the plan's copies, and the link. `measured`, and its
    stall: of the last one. `between`: from that decode step's predecessor to it, Python included. `slo`: the target.
    `driver`: of `measured`, in calls of the driver that change page tables."""

    resident: float | None = None
    predicted: float | None = None
    predicted_stall: float | None = None
    measured: float | None = None
    measured_stall: float | None = None
    between: float | None = None
    slo: float | None = None
    driver: float | None = None

    @property
    def met(self) -> bool | None:
        """Is the SLO kept: as measured, else as predicted? None where neither is known, or there is no SLO."""
        seconds = self.predicted if self.measured is None else self.measured
        return None if self.slo is None or seconds is None else seconds <= self.slo

    @classmethod
    def of(
        cls,
        plan: Plan,
        page_seconds: float | None,
        resident: float | None,
        last: Measured | None,
        slo: float | None,
        entering: float = 0.0,
    ) -> Self:
        """Makes the times of a plan. `page_seconds`: to copy a page, None where the link was not measured. `resident`:
        seconds with every layer resident, as a rule from the record; `entering`: of the host, for each that streams."""
        predicted = None
        if resident is not None and (page_seconds is not None or not plan.copied):
            predicted = Costs(plan.pages, resident, page_seconds or 0.0, entering).expected(plan)
        return cls(
            resident,
            predicted,
            None if predicted is None or resident is None else predicted - resident,
            None if last is None else last.total,
            None if last is None else last.stall,
            None if last is None else last.between,
            slo,
            None if last is None else last.driver,
        )


@dataclass(frozen=True, slots=True)
class PiecesReport:
    """How a model decodes. `way`: where forwards are cut, "fine" (at the cache's update and at attention) or "coarse"
    (at modules that are given the cache), or "eager", where no graphs are used; `why`: what kept it from finer ones.
    `captures` of forwards so far, `graphs` that there are, forwards `replayed`, `pages` of the device under graphs."""

    way: str
    why: str
    captures: int = 0
    graphs: int = 0
    replayed: int = 0
    pages: int = 0

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        if self.way == "eager" or (why and not self.graphs):
            return f"eager{why}"
        return f"{self.graphs} CUDA graphs, {self.way} cuts{why}, {self.captures} captures, {self.replayed:,} forwards"


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one model at one moment. `streamed`: the decoder layers whose parameters are on the host but for
    their own forward. `interval`: of every so many layers the last streams; None where nothing streams, or not at
    even intervals. `freed_pages`: of the device, that its weights do without. `token_bytes`: that come over the link in
    each iteration; `link_bytes`: that came so far; `bandwidth`: bytes per second, None where it was not measured.
    `file_bytes` and `host_bytes`: of the twins, those that lie in a file and those in host memory. `why`: the last
    decision's reason. `kept`: layers that stay resident, as CUDA graphs have captured them. `kv`: how each KV cache of
    the model reads what of it lies on the host. `lending`: what of the pages for KV it has reserved, lent and borrowed.

    `pages` of the device that hold weights of the model now, and `host_pages` that hold those of layers on the host.
    `unmanaged_tensors`: those that are not in the pool's ranges, and why: they cannot be moved, or were changed and
    could not be taken in again, as of the last look at the model, which is at the first forward after a change.
    `released`: the model is managed no more, as it was released or collected. `options`: what it is managed with.
    `pieces`: how it decodes, None where CUDA graphs are not considered."""

    model: str
    page_size: int
    layers: int
    streamed: tuple[int, ...]
    slots: int
    interval: int | None
    freed_pages: int
    bandwidth: float | None
    token_bytes: int
    link_bytes: int
    file_bytes: int
    host_bytes: int
    times: Mapping[Phase, Times]
    why: str = ""
    kept: tuple[int, ...] = ()
    kv: tuple[Streamed, ...] = ()
    lending: Lent = NO_LOANS
    pages: int = 0
    host_pages: int = 0
    unmanaged_tensors: Mapping[str, str] = field(default_factory=dict)
    released: bool = False
    options: ManageOptions = DEFAULTS
    pieces: PiecesReport | None = None

    @classmethod
    def of(
        cls,
        model: str,
        plan: Plan,
        page_size: int,
        *,
        bandwidth: float | None,
        resident: Mapping[Phase, float | None],
        last: Mapping[Phase, Measured],
        slos: Mapping[Phase, float | None],
        link_bytes: int,
        file_bytes: int,
        host_bytes: int,
        why: str = "",
        kept: tuple[int, ...] = (),
        kv: tuple[Streamed, ...] = (),
        lending: Lent = NO_LOANS,
        entering: float = 0.0,
    ) -> Self:
        """Makes a report. `resident`: seconds from the record, by phase, at the points of `last`. `last`: the last
        iteration, by phase. `entering`: as of `Times.of`."""
        page_seconds = None if bandwidth is None else page_size / bandwidth
        return cls(
            model,
            page_size,
            len(plan.pages),
            plan.streamed,
            len(plan.slot_pages),
            interval_of(plan),
            sum(plan.pages) - plan.device_pages,
            bandwidth,
            plan.copied_pages * page_size,
            link_bytes,
            file_bytes,
            host_bytes,
            {
                name: Times.of(plan, page_seconds, resident.get(name), last.get(name), slos.get(name), entering)
                for name in PHASES
            },
            why,
            kept,
            kv,
            lending,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: the fields, and of each phase whether it keeps its SLO (`met`)."""
        values = asdict(self)
        values["options"]["prefix_dir"] = self.options.prefix_dir and str(self.options.prefix_dir)
        for name, time_ in self.times.items():
            values["times"][name]["met"] = time_.met
        return values

    def __str__(self) -> str:
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.model, *(f"  {name:{width}}  {value}" for name, value in rows)])

    def _repr_html_(self) -> str:
        """Renders the report for a notebook."""
        return table(self.model, ("streaming", ""), self._rows())

    def _rows(self) -> Iterable[tuple[str, str]]:
        if self.released:
            yield "managed", "no more"
            return
        if self.pieces is not None:
            yield "decoding", str(self.pieces)
        yield "layers", f"{self.layers}, {self._streams()}"
        yield "weights", self._pages()
        if self.streamed:
            yield "device pages freed", f"{self.freed_pages:,} ({format_size(self.freed_pages * self.page_size)})"
        if self.kept:
            layers = ", ".join(map(str, self.kept))
            yield "kept resident", f"{len(self.kept)} layers that CUDA graphs have captured ({layers})"
        for name, time_ in self.times.items():
            yield from _times(NAMES[name], time_)
        if self.streamed or self.link_bytes:
            speed = "" if self.bandwidth is None else f", {self.bandwidth / 1e9:.3g} GB/s"
            yield "over the link", f"{format_size(self.token_bytes)} per iteration{speed}"
            yield "so far", format_size(self.link_bytes)
        if self.file_bytes or self.host_bytes:
            files, host = format_size(self.file_bytes), format_size(self.host_bytes)
            yield "backing store", f"{files} in files, {host} in host memory"
        for cache in self.kv:
            if cache.away or cache.copied:
                yield "KV on the host", _reads(cache, self.page_size)
        if self.lending != NO_LOANS:
            yield "KV reserved", f"{format_size(self.lending.reserve * self.page_size)}{self._loans()}"
        if self.why:
            yield "why", self.why
        for tensor, why in self.unmanaged_tensors.items():
            yield f"unmanaged: {tensor}", why

    def _pages(self) -> str:
        places = {"": self.pages, " on the host": self.host_pages}
        return ", ".join(
            f"{pages:,} pages ({format_size(pages * self.page_size)}){where}"
            for where, pages in places.items()
            if pages or not where
        )

    def _loans(self) -> str:
        loans = {"lent": self.lending.lent, "borrowed": self.lending.borrowed}
        said = [f", {format_size(pages * self.page_size)} {what}" for what, pages in loans.items() if pages]
        return "".join([*said, f"; in units of {format_size(self.lending.unit * self.page_size)}"])

    def _streams(self) -> str:
        if not self.streamed:
            return "none of them streamed"
        at = f"interval {self.interval}" if self.interval else f"layers {', '.join(map(str, self.streamed))}"
        return f"{len(self.streamed)} of them streamed through {self.slots} slot{'s' * (self.slots > 1)} ({at})"


def _reads(kv: Streamed, page: int) -> str:
    through = ""
    if kv.way is Way.STREAMED:
        size, wait = format_size(kv.slot_pages * page), format_time(max(0.0, kv.exposed))
        through = f" {kv.slots} of {size}, {wait} exposed in each iteration"
    return f"{format_size(kv.away * page)}, {kv.way}{through}; {format_size(kv.copied)} so far"


def interval_of(plan: Plan) -> int | None:
    """The offloading interval of the plan (Select-N §4.3): its number of layers and their spacing are those of that
    interval, at any offset around the cycle of layers. None where the plan is no interval."""
    if not plan.streamed:
        return None
    layers, first = len(plan.pages), plan.streamed[0] + 1
    if plan.streamed == every(layers, first):
        return first
    around = gaps(layers, plan.streamed)
    interval, count = min(around), len(around)
    return interval if layers // interval == count and around.count(interval) >= count - 1 else None


def _times(name: str, times: Times) -> Iterable[tuple[str, str]]:
    for what, seconds, stall in (
        ("predicted", times.predicted, times.predicted_stall),
        ("measured", times.measured, times.measured_stall),
    ):
        if seconds is not None:
            yield f"{name}, {what}", f"{format_time(seconds)}, of which {format_time(stall or 0.0)} wait for copies"
    if times.driver and times.measured:
        part = times.driver / times.measured
        yield f"{name}, driver calls", f"{format_time(times.driver)}, {part:.1%} of what was measured"
    if times.between is not None:
        yield f"{name} to {name}", format_time(times.between)
    if times.slo is not None:
        met = {True: "kept", False: "not kept", None: "not measured yet"}[times.met]
        yield f"{name}, SLO", f"{format_time(times.slo)}, {met}"
