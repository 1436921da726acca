"""Runs the probes one after the other, each in a process of its own, and collects their facts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Literal

from .. import device_choice, findings
from ..config import Config
from ..defaults import PREFLIGHT
from .judge import judge

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
    command = [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.child", name, library, str(ordinal)]
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
