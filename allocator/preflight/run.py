"""Runs the probes, each in a process of its own, and judges their facts: differences from what the code assumes,
settings to go round them, answers.

The process of a probe is `python -m ballonet.allocator.preflight.run NAME LIBRARY ORDINAL`; each fact is a line of JSON
on stdout. A probe that broke off, or did not run, decides nothing by itself, but for one that crashed over pages of the
host or in a graph, or whose driver never returned: then those are not used.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Literal

from .. import device_choice, findings
from ..config import Config
from ..defaults import PREFLIGHT, PROBE_SLOW
from .cuda import Cuda, DriverMissing
from .driver_probes import tell

# Probes that crash where pages of the host are bad, or hang: those that only the driver could hold up.
_CRASH: Final = ("host_pages", "several_handles", "torch_copies", "kernels")
_HANG: Final = ("host_pages", "several_handles")
_PINNED: Final = ("pages", "allocated")  # kinds of host memory that are compared

Probes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference from an assumption. `effect`: its consequence, and what is done about it."""

    what: str
    assumed: str
    found: str
    effect: str


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    question: str
    answer: str


@dataclass(slots=True)
class ProbeVerdict:
    """The verdict of a preflight. `settings`: values for fields of Config, each with its `reasons`."""

    settings: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    answers: list[ProbeAnswer] = field(default_factory=list)


def judge(probes: Probes, page_size: int) -> ProbeVerdict:
    """Judges all facts. `probes`: name → status ("answered", "failed", "crashed", "no end"), facts, said. `page_size`:
    the default."""
    verdict = ProbeVerdict()
    _page_size(probes, page_size, verdict)
    wrong = list(_wrong_with_host_pages(probes))
    if wrong:
        verdict.settings["host_pages"] = False
        verdict.reasons["host_pages"] = "; ".join(wrong)
        verdict.differences += [
            Difference(
                "pages of the host",
                "work behind addresses of the device",
                reason,
                "not used: nothing streams or spills, and KV stays on the device (host_pages=False)",
            )
            for reason in wrong
        ]
    if reasons := list(_wrong_with_graphs(probes)):
        verdict.settings["graphs"] = False
        verdict.reasons["graphs"] = "; ".join(reasons)
        verdict.differences += [
            Difference(
                "a CUDA graph", "is right, also after a page moved", reason, "models decode without (graphs=False)"
            )
            for reason in reasons
        ]
    verdict.differences += _speed(probes)
    for name, outcome in probes.items():
        if outcome["status"] != "answered":
            last = outcome["said"].splitlines()
            verdict.differences.append(
                Difference(f"probe {name}", "answers", outcome["status"], last[-1] if last else "said nothing")
            )
    verdict.answers += [ProbeAnswer(question, ask(probes)) for question, ask in QUESTIONS.items()]
    return verdict


def _facts_of(probes: Probes, name: str) -> Mapping[str, Any]:
    return probes.get(name, {}).get("facts", {})  # type: ignore[no-any-return]


def _error(value: Any) -> str:
    return str(value["error"]) if isinstance(value, Mapping) and "error" in value else ""


def _page_size(probes: Probes, page_size: int, verdict: ProbeVerdict) -> None:
    facts = _facts_of(probes, "granularity")
    sizes = [size for size in (facts.get("device"), facts.get("host")) if isinstance(size, int) and size > 0]
    least = math.lcm(*sizes) if sizes else page_size
    if page_size % least == 0:
        return
    chosen = math.lcm(page_size, least)
    why = f"pages of this driver are multiples of {least} bytes"
    verdict.settings["page_size"], verdict.reasons["page_size"] = chosen, why
    verdict.differences.append(Difference("page size", f"{page_size} bytes", why, f"pages of {chosen} bytes"))


def _wrong_with_host_pages(probes: Probes) -> Iterator[str]:
    """Yields why host pages cannot be used; nothing where they can, or it is not known."""
    tried = _facts_of(probes, "host_pages")
    for step in ("create", "map", "copied_there", "copied_back", "to_device", "from_device"):
        if why := _error(tried.get(step)):
            yield why
            return
        if tried.get(step) is False:
            yield f"bytes are not the same after the step {step}"
            return
    if why := _error(tried.get("open_for_device")):
        yield why
        return
    for name, checks in (
        ("copies", ("pages_to_device", "pages_from_device")),
        ("several_handles", ("to_device", "from_device", "on_host")),
        ("torch_copies", None),
        ("kernels", None),
        ("torch_graphs", ("on_host",)),
        ("graphs", ("host_page",)),
    ):
        for check, value in _facts_of(probes, name).items():
            if checks is not None and check not in checks:
                continue
            if _error(value):
                yield f"{name}, {check}: {_error(value)}"
            elif value is False or (isinstance(value, Mapping) and False in (value.get("equal"), value.get("right"))):
                yield f"{name}, {check}: not the same bytes"
    for name in _CRASH:
        ended = probes.get(name, {}).get("status")
        complete = name == "host_pages" and "from_device" in tried
        if (ended == "crashed" or (ended == "no end" and name in _HANG)) and not complete:
            yield f"the probe {name} {ended}: {probes[name]['said'].partition(chr(10))[0]}"


def _speed(probes: Probes) -> Iterator[Difference]:
    for way in ("to_device", "from_device"):
        ours, theirs = (_facts_of(probes, "copies").get(f"{kind}_{way}", {}).get("gb_per_s") for kind in _PINNED)
        if ours and theirs and ours < PROBE_SLOW * theirs:
            yield Difference(
                f"copies of pages of the host ({way})",
                "as fast as memory from cuMemHostAlloc",
                f"{ours} GB/s against {theirs}",
                "streaming is slower than the link; files that are registered are not",
            )


def _wrong_with_graphs(probes: Probes) -> Iterator[str]:
    """Yields why no graphs are to be used; nothing where they are right, or it is not known."""
    for name, checks in (
        ("graphs", ("as_captured", "another_page")),
        ("torch_graphs", ("as_captured", "on_device", "in_pieces", "in_pieces_on_device")),
    ):
        for check in checks:
            value = _facts_of(probes, name).get(check)
            if value is False or _error(value):
                yield f"{name}, {check}: {_error(value) or 'not the same bytes'}"
        if probes.get(name, {}).get("status") == "crashed":
            yield f"the probe {name} crashed: {probes[name]['said'].partition(chr(10))[0]}"


def _of(name: str, *checks: str) -> Callable[[Probes], str]:
    """Returns a function whose answer lists a probe's facts about `checks`, or all."""

    def ask(probes: Probes) -> str:
        facts, outcome = _facts_of(probes, name), probes.get(name)
        if outcome is None:
            return "not asked"
        told = {check: value for check, value in facts.items() if not checks or check in checks}
        text = "; ".join(f"{check}: {_plain(value)}" for check, value in told.items())
        return text or f"{outcome['status']}: {outcome['said'].splitlines()[-1] if outcome['said'] else 'nothing told'}"

    return ask


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _error(value):
        return _error(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return str(value)


QUESTIONS: Final[Mapping[str, Callable[[Probes], str]]] = {
    "Do pages of the host work behind addresses of the device?": _of("host_pages"),
    "Are copies of them right, and as fast as of memory that the driver allocated?": _of("copies"),
    "Are torch's copies, which say that both sides are the device's, right over pages of the host?": _of(
        "torch_copies"
    ),
    "Is one copy right that spans several pages of the host?": _of("several_handles"),
    "Do kernels compute the same from pages of the host, and how fast do they read?": _of("kernels"),
    "Is a graph right that is replayed after its page moved?": _of("graphs"),
    "Is a graph of torch's?": _of("torch_graphs"),
}


SAID = 2000  # characters of what a probe said that failed


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe: the module of its function, which has its name, and its time limit."""

    module: str
    seconds: float = 60
    uses_torch: bool = False
    needs_gpu: bool = False  # the stand-in, on which torch computes on the CPU, has no answer


PROBES: Final[Mapping[str, Probe]] = {
    "granularity": Probe("driver_probes"),
    "host_pages": Probe("driver_probes"),
    "copies": Probe("driver_probes"),
    "several_handles": Probe("driver_probes"),
    "graphs": Probe("driver_probes"),
    "torch_copies": Probe("torch_probes", uses_torch=True),
    "kernels": Probe("torch_probes", uses_torch=True),
    "torch_graphs": Probe("torch_probes", uses_torch=True, needs_gpu=True),
}

Status = Literal["answered", "failed", "crashed", "no end"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a probe. `facts`: those told before it ended, however that was; `said`: the end of its stderr
    where it did not end well."""

    status: Status
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""


def run_probe(name: str, library: str, ordinal: int, left: float = PREFLIGHT) -> Outcome:
    """Runs a probe in a process, which is killed after the probe's time. `left`: seconds of the whole preflight; a
    cut-off by these says nothing of the probe."""
    if left <= 0:
        return Outcome("failed", 0, {}, "no time was left")
    command = [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.run", name, library, str(ordinal)]
    limit = min(left, PROBES[name].seconds)
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            code = process.wait(limit)
            status: Status = "answered" if code == 0 else "crashed" if code < 0 else "failed"
            why = "" if code == 0 else _signal(-code) if code < 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            cut = limit < PROBES[name].seconds
            status, why = ("failed", "no time was left") if cut else ("no end", f"no end within {limit:g} s")
        finally:
            process.kill()
            process.wait()
        facts = _facts(out)
        err.seek(0)
        said = f"{why}\n{err.read()[-SAID:]}".strip() if status != "answered" else ""
    return Outcome(status, round(time.monotonic() - begin, 2), facts, said)


def _facts(told: IO[str]) -> dict[str, Any]:
    """Returns the facts among what a probe printed; a last line that was cut off is none."""
    told.seek(0)
    facts = {}
    for line in told:
        try:
            fact = json.loads(line)
            facts[fact["fact"]] = fact["value"]
        except (ValueError, KeyError, TypeError):
            continue
    return facts


def _signal(number: int) -> str:
    try:
        return f"died of {signal.Signals(number).name}"
    except ValueError:
        return f"died of signal {number}"


def preflight(
    target: device_choice.Target,
    names: tuple[str, ...] = tuple(PROBES),
    begun: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Runs all probes, and judges; returns plain values, ready for JSON. `begun` is told the name of each probe before
    it runs.

    Keys: when, key (of the device and its driver), probes (name → status, seconds, facts, said), settings, reasons,
    differences (what, assumed, found, effect), answers (question, answer).
    """
    outcomes, deadline = {}, time.monotonic() + PREFLIGHT
    for name in names:
        if PROBES[name].needs_gpu and target.kind != "cuda":
            outcomes[name] = Outcome("answered", 0, {"skipped": "the stand-in has no such thing"})
            continue
        begun(name)
        outcomes[name] = run_probe(name, target.library, target.ordinal, deadline - time.monotonic())
    plain = {name: asdict(outcome) for name, outcome in outcomes.items()}
    judged = judge(plain, device_choice.page_size(Config(), target.kind))
    return {
        "when": datetime.now().isoformat(timespec="seconds"),
        "key": findings.key_of(target.facts),
        **asdict(judged),
        "probes": plain,
    }


def write(result: Mapping[str, Any], path: Path) -> None:
    """Writes the whole result as JSON. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main(name: str, library: str, ordinal: int) -> None:
    probe = PROBES[name]
    faulthandler.dump_traceback_later(0.9 * probe.seconds)  # where one that hangs is
    ask = getattr(importlib.import_module(f".{probe.module}", __package__), name)
    try:
        ask(tell, library, ordinal) if probe.uses_torch else ask(Cuda(library, ordinal), tell)
    except DriverMissing as error:
        tell("skipped", str(error))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
