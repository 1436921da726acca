"""Finds the speed of each setting of bench_tenants: the greatest, within a tenth, at which the floor keeps its limit.

    python benchmarks/speeds.py [--traces FILE...] [--cases 4]

Then says how much longer the best peer takes. Runs are kept as those of bench_tenants are: what was cut off goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_tenants import (
    FLOOR,
    FLOORS,
    PEERS,
    REQUESTS,
    ROWS,
    SEEDS,
    Run,
    Setting,
    chosen_settings,
    compared,
    known,
    measured,
)
from harness import Options

STEP = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", type=Path, default=[])
    parser.add_argument("--cases", type=int, help="only the first so many settings")
    given = parser.parse_args()
    options = Options(tiny=False, cuda=False, cases=given.cases, traces=given.traces)
    for setting in chosen_settings(options):
        there = at_limit(setting, given.traces)
        floor = slowest(there, FLOOR, given.traces)
        peers = [seconds for policy in PEERS if (seconds := slowest(there, policy, given.traces)) is not None]
        print(f"{there}: floor {floor:.3g} s, best peer {min(peers, default=0.0):.3g} s", flush=True)


def at_limit(setting: Setting, traces: Sequence[Path]) -> Setting:
    """Returns the setting at the greatest speed that the floor bears, starting at its own."""
    while not bears(setting, traces):
        setting = faster(setting, 1 / STEP)
    while bears(quicker := faster(setting, STEP), traces):
        setting = quicker
    return setting


def faster(setting: Setting, times: float) -> Setting:
    return replace(setting, speed=float(f"{setting.speed * times:.2g}"))


def bears(setting: Setting, traces: Sequence[Path]) -> bool:
    seconds = slowest(setting, FLOOR, traces)
    return seconds is not None and seconds <= FLOORS


def slowest(setting: Setting, policy: str, traces: Sequence[Path]) -> float | None:
    """Returns the greatest P99 TTFT of the seeds; None where a run does not fit or answers too few."""
    runs = [Run(setting, seed, policy, REQUESTS) for seed in SEEDS]
    *_, rows = measured(runs, traces, ROWS)
    return max(known(row["ttft_p99"]) for row in rows.values()) if all(map(compared, rows.values())) else None


if __name__ == "__main__":
    main()
