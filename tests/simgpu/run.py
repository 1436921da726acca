"""`make test-cuda`: the tests that need a GPU, on the simulated device, with the streams at several delays and seeds.

    python tests/simgpu/run.py [--torch 2.11.0] [--quick] [--jobs 2] [--delay 50 [--seed 1]] [PATTERN...]

A stage is one run of pytest under one setting of the device. A line says which test has just ended; the table at the
end and build/test-cuda.json say what every stage came to. PATTERN: only stages whose names contain one of them; with
--delay one stage, all tests with so many microseconds before each operation. The output of each stage is in
build/test-cuda/; what the tests that failed have said is printed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import environment

ROOT = environment.ROOT
LOGS = ROOT / "build" / "test-cuda"
SUMMARY = ROOT / "build" / "test-cuda.json"
LINE = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(PASSED|FAILED|SKIPPED|ERROR|XFAIL) )?(tests/\S+(?: \S+)*?)"
                  r"(?: (PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b.*| - .*)?$")  # fmt: skip
FAILURES = re.compile(r"^=+ (?:FAILURES|ERRORS) =+$.*?(?=^=+ (?!FAILURES|ERRORS))", re.MULTILINE | re.DOTALL)
FAILING = ("FAILED", "ERROR")

# Where the order of host and device matters: run again with the host far ahead.
ORDER = (
    "tests/gpu/test_core_pages.py",
    "tests/gpu/test_core_captures.py",
    "tests/gpu/test_kv_slots.py",
    "tests/gpu/test_kv_stream.py",
    "tests/gpu/test_kv_tokens.py",
    "tests/gpu/test_pieces.py",
    "tests/gpu/test_pieces_broken_off.py",
    "tests/gpu/test_pieces_changes.py",
    "tests/gpu/test_prefix.py",
    "tests/gpu/test_weights_order.py",
    "tests/gpu/test_balloon_core.py",
)
QUICK = (
    "tests/gpu/test_core_pages.py",
    "tests/gpu/test_core_captures.py",
    "tests/gpu/test_core_order.py",
    "tests/gpu/test_kv_slots.py",
    "tests/gpu/test_weights_order.py",
    "tests/gpu/test_core_simulated.py",
)


@dataclass(frozen=True)
class Stage:
    name: str
    delay: int  # ns before each operation of the device
    seed: int
    paths: tuple[str, ...] = ("tests",)
    marked: str = "gpu"


@dataclass
class Outcome:
    stage: Stage
    seconds: float = 0
    status: int = 0
    results: dict[str, str] = field(default_factory=dict)  # test -> PASSED, FAILED, ...

    def count(self, *kinds: str) -> int:
        return sum(result in kinds for result in self.results.values())

    @property
    def failed(self) -> bool:
        """True, too, where nothing ran: a selection that selects nothing proves nothing."""
        return self.status != 0 or not self.count("PASSED")


STAGES = (
    Stage("everything", 0, 0),
    Stage("host 50 us ahead", 50_000, 1, ORDER),
    Stage("host 1 ms ahead", 1_000_000, 2, ORDER[:3]),
)
QUICK_STAGES = (
    Stage("quick", 0, 0, QUICK),
    Stage("quick, host 50 us ahead", 50_000, 1, QUICK[1:]),
)


def lines(process: subprocess.Popen[str], log: Path) -> Iterator[str]:
    """What pytest says, line by line, also into the log."""
    assert process.stdout is not None
    with log.open("w") as kept:
        for line in process.stdout:
            kept.write(line)
            kept.flush()
            yield line.rstrip()


def play(stage: Stage, python: Path, jobs: int) -> Outcome:
    outcome = Outcome(stage)
    settings = {
        "SIMGPU_HOME": str(environment.build.BUILD),
        "SIMGPU_DELAY": str(stage.delay),
        "SIMGPU_SEED": str(stage.seed),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }
    command = [
        str(python),
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "--durations=20",
        "-m",
        stage.marked,
        "-p",
        "no:cacheprovider",
    ]
    if jobs > 1:
        many = 2 * jobs if stage.delay else jobs  # streams that are late sleep
        command += ["-n", str(many), "--dist", "worksteal"]
    log = LOGS / (re.sub(r"\W+", "-", stage.name) + ".log")
    start = time.monotonic()
    with subprocess.Popen(
        [*command, *stage.paths], cwd=ROOT, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in lines(process, log):
            match = LINE.match(line)
            if match and (result := match[1] or match[3]):
                outcome.results[match[2]] = result
                spent = time.monotonic() - start
                print(f"  {spent:5.0f} s  {len(outcome.results):3}  {result.lower():7} {match[2]}", flush=True)
    outcome.seconds, outcome.status = round(time.monotonic() - start, 1), process.returncode
    if outcome.failed:
        print(*FAILURES.findall(log.read_text()), f"  see {log.relative_to(ROOT)}", sep="\n")
    return outcome


def table(outcomes: list[Outcome]) -> str:
    rows = [("stage", "delay", "seed", "passed", "failed", "skipped", "seconds")]
    for outcome in outcomes:
        stage = outcome.stage
        counts = (outcome.count("PASSED"), outcome.count(*FAILING), outcome.count("SKIPPED"))
        rows.append(
            (stage.name, f"{stage.delay / 1000:g} us", str(stage.seed), *map(str, counts), f"{outcome.seconds:.0f}")
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=environment.TORCH)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--delay", type=float, help="microseconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("patterns", nargs="*")
    chosen = parser.parse_args()
    python = environment.prepare(environment.fetch(chosen.torch))
    LOGS.mkdir(parents=True, exist_ok=True)
    stages = QUICK_STAGES if chosen.quick else STAGES
    if chosen.delay is not None:
        stages = (
            Stage(f"everything at {chosen.delay:g} us, seed {chosen.seed}", round(1000 * chosen.delay), chosen.seed),
        )
    wanted = [stage for stage in stages if not chosen.patterns or any(part in stage.name for part in chosen.patterns)]
    outcomes = []
    for number, stage in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {stage.name}: delay {stage.delay / 1000:g} us, seed {stage.seed}", flush=True)
        outcomes.append(play(stage, python, chosen.jobs))
    print(table(outcomes))
    said = {"torch": chosen.torch, "stages": [{**asdict(outcome), "failed": outcome.failed} for outcome in outcomes]}
    SUMMARY.write_text(json.dumps(said, indent=1) + "\n")
    failing = {name for outcome in outcomes for name, result in outcome.results.items() if result in FAILING}
    for name in sorted(failing):
        print(f"failed: {name}")
    return int(any(outcome.failed for outcome in outcomes) or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
