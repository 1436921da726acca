"""Plans runs: the question, the models' needs, the answer, and changes that would help, as plain values and for people.

Note [Worst moments]
    The time to the first token is that of the whole prompt, computed at once as `generate()` does it; the time per
    token is that of the last one, which reads most. Pages are those at the last token.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from os import PathLike, fspath
from typing import Any, Final, SupportsIndex

from ...allocator import device_choice, install
from ...allocator.config import Config, parse_size, parse_time
from ...allocator.errors import ConfigError
from ...allocator.units import format_size, format_time
from ...offload.policy.planner.answer import Forecast, PlanAnswer, PlanChange, Question, answered, nearest
from ...offload.policy.planner.memory import Binding, PlanBudget
from ..device import managers
from ..measure.report import interval_of
from .forward import ModelShape, shape_of
from .needs import Device, Sizing, Speed, device_of, host_pages, speed_of

Facts = dict[str, Any]
_UNITS: Final = {
    "budget": "bytes",
    "host": "bytes",
    "context": "tokens",
    "batch": "sequences",
    "weights": "bits",
    "slo": "seconds",
}
_LIMITS = {
    "memory": "memory: it does not fit, even if all layers stream",
    "host": "host memory: what leaves the device has no room there",
    "link": "the link: tokens wait for copies from host memory",
    "compute": "compute: nothing is waited for",
    None: "not known, as nobody knows what an iteration takes",
}

_MOMENTS: Final = {
    "loading": "loading, the room for a forward included",
    "prompt": "the prompt",
    "answer": "the answer",
}
_OWNERS: Final = {"weights": "weights", "kv": "KV", "activations": "activations"}


def plan(
    models: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    context: int,
    batch: int = 1,
    prompt: int | None = None,
    budget: SupportsIndex | str | None = None,
    page_size: SupportsIndex | str | None = None,
    gpu: str | PathLike[str] | None = None,
    slo: float | str | None = None,
    host_budget: SupportsIndex | str | None = None,
) -> Facts:
    """Plans a run of `models` from their configurations: folders, names on the hub, or types such as "llama". Loads no
    weights and opens no device.

    `context`: tokens that each of `batch` sequences holds at the last token. `prompt`: tokens of the prompt, by default
    all but one. `budget`: bytes of device pages, or "24GiB". `gpu`: a name such as "h100", or a JSON file with memory,
    bandwidth, flops and link; by default this machine. `slo`: seconds that a token may take, or "80ms". `host_budget`:
    bytes of host pages, by default a run's default on this machine, on another one as many as it needs.

    Returns plain values, ready for JSON. fits; least_budget (bytes); budget, host_budget, page_size, context, prompt,
    batch, slo, slo_met; pages of the device at the last token: {weights, kv, activations}, the last an upper bound from
    the operators' allocations; exact: pages of weights and KV are those of a run, to the page (policy/planner/
    memory.py, Note [What cannot be foreseen]); host_pages: {weights, kv}; interval (of every so many layers the last
    streams, None where none does or not at even intervals), layers_streamed; ttft_seconds, tpot_seconds (None where not
    known); limit ("memory", "host", "link", "compute", None); binds: what sets the least budget, {what ("weights",
    "kv", "activations" or "host"), when ("loading", "prompt", "answer"), pages: those that are needed at once then};
    hardware: {name, source, link}; changes: the nearest that would lift the limit, a list of {what, to, unit, text,
    fits, ttft_seconds, tpot_seconds, limit, layers_streamed};
    models: of each {model, class, dtype, layers, streamed, ...}, with those of the keys above that differ by model.
    Several models run at once, and times, limit and interval are those of the slowest. ConfigError.
    """
    return Planner(models, context, batch, prompt, budget, page_size, gpu, slo, host_budget).facts()


class Planner:
    """Answers one question by plans of the models."""

    def __init__(
        self,
        models: str | PathLike[str] | Iterable[str | PathLike[str]],
        context: int,
        batch: int = 1,
        prompt: int | None = None,
        budget: SupportsIndex | str | None = None,
        page_size: SupportsIndex | str | None = None,
        gpu: str | PathLike[str] | None = None,
        slo: float | str | None = None,
        host_budget: SupportsIndex | str | None = None,
    ) -> None:
        """Takes the arguments of `plan`. ConfigError."""
        names = [fspath(models)] if isinstance(models, str | PathLike) else [fspath(model) for model in models]
        prompt = max(1, context - 1) if prompt is None else prompt
        _check(names, context, batch, prompt)
        settings = Config.from_env()
        if budget is not None:
            settings = replace(settings, budget=parse_size(budget, "budget"))
        if page_size is not None:
            settings = replace(settings, page_size=parse_size(page_size, "page_size"))
        if host_budget is not None:
            settings = replace(settings, host_budget=parse_size(host_budget, "host_budget"))
        self.device: Device = device_of(None if gpu is None else fspath(gpu), settings)
        self.page = device_choice.page_size(settings, self.device.kind)
        seconds = None if slo is None else parse_time(slo, "slo")
        if seconds == 0:
            raise ConfigError("slo is 0, and no token takes no time: give seconds, or a text such as '80ms'")
        pages = (settings.budget or self.device.memory) // self.page
        host = host_pages(self.device, settings, self.page)
        self.asked = Question(pages, context, prompt, batch, None, seconds, host)
        shapes = [shape_of(name) for name in names]
        for shape in shapes:
            _check_positions(shape, context)
        self.sizings: Sequence[Sizing] = [Sizing(shape, self.page) for shape in shapes]
        self.speeds: Sequence[Speed] = [speed_of(self.device, sizing, settings) for sizing in self.sizings]
        self.ask = cache(self._ask)

    def facts(self) -> Facts:
        """Returns the values that `plan` describes."""
        answer = self.ask(self.asked)
        changes = nearest(self.asked, answer, self.ask)
        asked, slowest = self.asked, answer.slowest
        return {
            "fits": answer.fits,
            "least_budget": answer.least * self.page,
            "budget": asked.pages * self.page,
            "host_budget": None if asked.host is None else asked.host * self.page,
            "page_size": self.page,
            "context": asked.context,
            "prompt": asked.prompt,
            "batch": asked.batch,
            "slo": asked.slo,
            "slo_met": answer.met,
            "exact": all(model.settled for model in answer.models),
            "pages": _sum(_pages(model) for model in answer.models),
            "host_pages": _sum(_host(model) for model in answer.models),
            **_told(slowest, answer),
            "binds": _binds(answer.binding),
            "hardware": {"name": self.device.name, "source": self.speeds[0].source, "link": self.speeds[0].link},
            "changes": [self._change(change) for change in changes],
            "models": [self._model(*pair, answer) for pair in zip(self.sizings, answer.models, strict=True)],
        }

    def curve(self, points: int) -> list[tuple[int, float | None]]:
        """Returns points (bytes of budget, seconds per token), from the smallest budget that fits to the larger of one
        that holds everything and the given one."""
        answer = self.ask(self.asked)
        low, high = answer.least, max(answer.all, self.asked.pages if answer.fits else 0, answer.least + 1)
        budgets = sorted({low + round((high - low) * step / (points - 1)) for step in range(points)})
        answers = [(pages, self.ask(replace(self.asked, pages=pages))) for pages in budgets]
        return [(pages * self.page, outcome.slowest.tpot) for pages, outcome in answers if outcome.fits]

    def _ask(self, asked: Question) -> PlanAnswer:
        seconds_of = [speed.seconds(sizing, asked) for speed, sizing in zip(self.speeds, self.sizings, strict=True)]
        needs = [
            sizing.needs(f"{sizing.shape.name} ({number})", asked, seconds, speed.judged(asked), speed.beside())
            for number, (sizing, speed, seconds) in enumerate(zip(self.sizings, self.speeds, seconds_of, strict=True))
        ]
        link = self.speeds[0].link
        known = self.speeds[0].known
        page_seconds, copying = None if link is None else self.page / link, 0.0 if known is None else known.copying
        budget = PlanBudget(asked.pages, self.page, page_seconds, asked.slo, asked.host, copying)
        return answered(needs, budget, asked.context - asked.prompt, managers.composed_with().tuning)

    def _change(self, change: PlanChange) -> Facts:
        to: float = change.to * self.page if change.what in ("budget", "host") else change.to
        return {
            "what": change.what,
            "to": to,
            "unit": _UNITS[change.what],
            "text": _text(change, to),
            "fits": change.answer.fits,
            **_told(change.answer.slowest, change.answer),
        }

    def _model(self, sizing: Sizing, forecast: Forecast, answer: PlanAnswer) -> Facts:
        shape = sizing.shape
        return {
            "model": shape.name,
            "class": type(shape.model).__name__,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "weights": sum(weight.nbytes for weight in shape.weights),
            "layers": shape.layers,
            "streamed": [] if forecast.plan is None else list(forecast.plan.streamed),
            "pages": _pages(forecast),
            "host_pages": _host(forecast),
            **_told(forecast, answer),
        }


def outlook(model: str, context: int, budget: int, page_size: int) -> str:
    """Says in sentences whether a sequence of `context` tokens fits into so many bytes, from which budget on it does,
    and what a token takes there and with all layers on the device. Raises nothing: a measurement ends with it."""
    try:
        with install.stock():
            planner = Planner(model, context, budget=budget, page_size=page_size)
            asked = planner.ask(planner.asked)
            least, whole = (planner.ask(replace(planner.asked, pages=pages)) for pages in (asked.least, asked.all))
    except Exception:  # any error: transformers' own code for the configuration, too
        return "Whether it fits is not known: no plan can be made of its configuration."
    name, given = f"One sequence of {context:,} tokens", format_size(budget)
    fewest, all_ = _at_least(asked.least * page_size), _at_least(asked.all * page_size)
    streams = _streamed(asked)
    layers = planner.sizings[0].shape.layers
    where = f"{streams} of {layers} layers coming from host memory" if streams else f"all {layers} layers on the device"
    text = (
        f"{name} fits into the budget of {given}, with {where}."
        if asked.fits
        else f"{name} does not fit into the budget of {given}."
    )
    text += f" It needs {fewest} at least; with {all_} nothing comes from host memory."
    slow, fast = least.slowest.tpot, whole.slowest.tpot
    if slow is None or fast is None:
        return text
    counted = "counted from what was measured"
    if slow <= fast:
        return f"{text} A token takes {format_time(fast)} with either ({counted})."
    return (
        f"{text} A token takes {format_time(fast)} then, and {format_time(slow)} with the least, "
        f"{fast / slow:.2g} times as fast ({counted})."
    )


def _streamed(answer: PlanAnswer) -> int:
    plan = answer.slowest.plan
    return 0 if plan is None else len(plan.streamed)


def _told(forecast: Forecast, answer: PlanAnswer) -> Facts:
    plan = forecast.plan
    return {
        "interval": None if plan is None else interval_of(plan),
        "layers_streamed": None if plan is None else len(plan.streamed),
        "ttft_seconds": forecast.ttft,
        "tpot_seconds": forecast.tpot,
        "limit": answer.limit,
    }


def _binds(binding: Binding) -> Facts:
    pages = {"weights": binding.weights, "kv": binding.kv, "activations": binding.activations}
    return {"what": binding.what, "when": binding.phase.name.lower(), "pages": pages}


def _pages(forecast: Forecast) -> dict[str, int]:
    return {"weights": forecast.weights, "kv": forecast.kv, "activations": forecast.activations}


def _host(forecast: Forecast) -> dict[str, int]:
    return {"weights": 0 if forecast.plan is None else forecast.plan.host_pages, "kv": forecast.host}


def _sum(pages: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for page in pages:
        for name, count in page.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def _text(change: PlanChange, to: float) -> str:
    if change.what == "budget":
        return f"a budget of {_at_least(int(to))}"
    if change.what == "host":
        return f"a host budget of {_at_least(int(to))}"
    if change.what == "context":
        return f"a context of {int(to):,} tokens"
    if change.what == "batch":
        return f"a batch of {int(to)}"
    if change.what == "weights":
        return f"weights of {int(to)} bits"
    return f"an SLO of {format_time(to)}"


def _at_least(nbytes: int) -> str:
    """Formats bytes as `format_size` does, but never rounds down."""
    unit = next((scale for scale in (2**40, 2**30, 2**20, 2**10) if nbytes >= scale), 1)
    return format_size(math.ceil(nbytes / unit * 100) * unit // 100)


def _check(names: Sequence[str], context: int, batch: int, prompt: int) -> None:
    if not names:
        raise ConfigError("no model was given: name a folder, a model on the hub, or a type such as llama")
    for what, number in (("context", context), ("batch", batch), ("prompt", prompt)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"{what} is {number!r}: give a whole number from 1 on")
    if prompt > context:
        raise ConfigError(
            f"a prompt of {prompt} tokens is longer than the context of {context}, which includes it: give a shorter "
            "prompt, or a longer context"
        )


def _check_positions(shape: ModelShape, context: int) -> None:
    if shape.positions and context > shape.positions:
        raise ConfigError(
            f"a context of {context} tokens is beyond the {shape.positions} positions that {shape.name} was made for: "
            f"give at most {shape.positions}, or a configuration whose rope_parameters and positions are longer"
        )


def show(facts: Facts) -> None:
    """Prints the result of `planner.plan`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    budget, least = (format_size(facts[name]) for name in ("budget", "least_budget"))
    asked = f"{facts['batch']} x {facts['context']:,} tokens in {budget} on {facts['hardware']['name']}"
    console.print(f"{', '.join(fact['model'] for fact in facts['models'])}: {asked}", markup=False)
    if facts["fits"]:
        console.print(f"[green]It fits.[/] The least budget that does is {least}.")
    else:
        console.print(
            f"[red]It does not fit.[/] The least budget that does is {least} ({facts['least_budget']} bytes)."
        )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(facts):
        table.add_row(*row)
    console.print(table)
    if facts["changes"]:
        console.print()
        console.print(_changes(facts["changes"]))


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    page, several = facts["page_size"], len(facts["models"]) > 1
    for fact in facts["models"]:
        name = f"{fact['model']}: " if several else ""
        pages, host = fact["pages"], fact["host_pages"]
        yield f"{name}weights", f"{_size(pages['weights'], page)}{_streams(fact)}{_beside(host['weights'], page)}"
        yield f"{name}KV", f"{_size(pages['kv'], page)}{_beside(host['kv'], page)}"
        yield f"{name}activations", f"{_size(pages['activations'], page)}, at most"
        if several and fact["tpot_seconds"] is not None:
            yield f"{name}per token", format_time(fact["tpot_seconds"])
    if facts["fits"] and not facts["exact"]:
        yield (
            "",
            "about: what leaves hangs on what kernels allocate inside of themselves, or on times that nobody measured",
        )
    yield "first token", _time(facts["ttft_seconds"])
    yield "per token", _time(facts["tpot_seconds"]) + _slo(facts)
    yield "least budget", _bound(facts["binds"], page)
    yield "limit", _LIMITS[facts["limit"]] + _of_host(facts)
    link = facts["hardware"]["link"]
    yield "times", facts["hardware"]["source"] + ("" if link is None else f", link {link / 1e9:.3g} GB/s")


def _bound(binds: Facts, page: int) -> str:
    """Says what sets the least budget."""
    pages = sorted(binds["pages"].items(), key=lambda owned: -owned[1])
    parts = ", ".join(f"{_OWNERS[owner]} {format_size(count * page)}" for owner, count in pages if count)
    which = "host memory, which lacks room for what leaves" if binds["what"] == "host" else _MOMENTS[binds["when"]]
    return f"set by {which}: {parts} at once"


def _size(pages: int, page: int) -> str:
    return f"{pages:,} pages ({format_size(pages * page)})"


def _beside(pages: int, page: int) -> str:
    return f", {format_size(pages * page)} on the host" if pages else ""


def _streams(facts: Facts) -> str:
    if not facts["layers_streamed"]:
        return f", all {facts['layers']} layers resident" if facts["layers_streamed"] == 0 else ""
    at = "" if facts["interval"] is None else f" (interval {facts['interval']})"
    return f", {facts['layers_streamed']} of {facts['layers']} layers stream{at}"


def _time(seconds: float | None) -> str:
    return "not known" if seconds is None else format_time(seconds)


def _of_host(facts: Facts) -> str:
    return f", which has {format_size(facts['host_budget'])}" if facts["limit"] == "host" else ""


def _slo(facts: Facts) -> str:
    if facts["slo"] is None:
        return ""
    kept = {True: "kept", False: "not kept", None: "not known whether it is kept"}[facts["slo_met"]]
    return f", SLO {format_time(facts['slo'])} {kept}"


def _changes(changes: list[Facts]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what would help", no_wrap=True)
    for column in ("first token", "per token", "layers that stream", "limit"):
        table.add_column(column, justify="right")
    for change in changes:
        streams = f"{change['layers_streamed']}"
        table.add_row(
            change["text"], _time(change["ttft_seconds"]), _time(change["tpot_seconds"]), streams, change["limit"] or ""
        )
    return table


def helpful_changes(config: Any, *, batch: int, context: int, budget: int, page_size: int) -> Sequence[str]:
    """Returns the nearest changes with which `batch` sequences of `context` tokens, of a model with this configuration,
    fit into so many bytes of device pages; none where they fit by the plan, or no plan can be made. Raises nothing, as
    it runs while another error is worded."""
    try:
        with tempfile.TemporaryDirectory(prefix="ballonet-") as folder, install.stock():
            config.save_pretrained(folder)
            facts = plan(folder, context=context, prompt=context, batch=batch, budget=budget, page_size=page_size)
    except Exception:  # any error: unknown configurations, and transformers' own code for them
        return ()
    return [] if facts["fits"] else [change["text"] for change in facts["changes"] if change["fits"]]
