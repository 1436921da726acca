"""An operation that would touch memory which changed under it is reported, and never passes for a success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..simgpu.build import build_device

ROOT = Path(__file__).resolve().parents[2]
REPORTED = 86  # the exit status


def play(scene: str, report: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    chosen = {"GRANULARITY": "64KiB", "MEMORY": "16MiB", "REPORT": str(report), **settings}
    environment = {**os.environ, **{f"SIMGPU_{name}": value for name, value in chosen.items()}}
    command = [sys.executable, "-m", "tests.contract.violations", scene, str(build_device() / "libcuda.so.1")]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("unmapped_under_a_queued_kernel", ["late_kernel", "writes", "unmapped since it was queued"]),
        ("remapped_under_a_queued_kernel", ["late_kernel", "reads", "was mapped since it was queued"]),
        ("unmapped_under_a_queued_copy", ["cuMemcpyAsync", "reads", "unmapped since it was queued"]),
        ("unmapped_under_a_running_kernel", ["running_kernel", "is running where memory is unmapped"]),
        ("unmapped_under_a_graph", ["captured_kernel", "unmapped since it was queued"]),
        ("never_mapped", ["no memory that a device may use"]),
        ("pageable_memory_in_a_kernel", ["no memory that a device may use"]),
        ("unregistered_under_a_queued_copy", ["cuMemcpyAsync", "unregistered since it was queued"]),
        ("a_mapped_file_that_became_shorter", ["cuMemcpyAsync", "memory that is gone"]),
    ],
)
def test_a_violation_is_reported_and_ends_the_device(tmp_path: Path, scene: str, words: list[str]) -> None:
    report = tmp_path / "report"
    done = play(scene, report)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode == REPORTED
    told = report.read_text()
    assert told in done.stderr
    assert all(word in told for word in ["VIOLATION", " on stream ", "queued at", *words]), told
    stacks = told.count("simgpu_launch") + told.count("cuMemcpyAsync+") + told.count("cuGraphLaunch")
    assert stacks >= 1, "the stack at which it was queued"
    if "since it was queued" in told:
        assert any(call in told for call in ("cuMemUnmap+", "cuMemMap+", "cuMemHostUnregister+")), told


@pytest.mark.parametrize(
    "scene",
    ["an_injected_error_stays", "what_is_queued_at_the_end_does_not_hang", "a_child_of_a_fork_is_refused"],
)
def test_no_report_is_made_where_nothing_was_wrong(tmp_path: Path, scene: str) -> None:
    report = tmp_path / "report"
    done = play(scene, report, **({"FAULT": "sticky:2"} if "injected" in scene else {}))
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert not report.exists()


def test_a_device_can_be_absent(tmp_path: Path) -> None:
    done = play("never_mapped", tmp_path / "report", FAULT="init")
    assert "cuInit = 100" in done.stderr


def test_a_setting_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = play("never_mapped", tmp_path / "report", DELAY="soon")
    assert done.returncode == 1
    assert "cuInit = 999" in done.stderr
