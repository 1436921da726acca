"""The preflight finds what a driver does otherwise than assumed, survives it, and what it chose is kept to."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ballonet import __main__
from ballonet.allocator import device_choice, devices, findings, info
from ballonet.allocator.config import Config
from ballonet.allocator.preflight import report, run
from ballonet.allocator.preflight.run import ProbeVerdict, judge

from .core import shim

PAGE = 2**21
HEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
typedef unsigned long long u64;
struct prop { int type, handles, location, node; };
"""


def creating(instead: str) -> str:
    """A driver that does something else where a page of the host is created."""
    return f"""{HEAD}
int cuMemCreate(u64* handle, unsigned long size, struct prop* wanted, u64 flags) {{
  if (wanted->location == 3) {instead};
  return ((int (*)(u64*, unsigned long, struct prop*, u64))dlsym(RTLD_NEXT, "cuMemCreate"))(
      handle, size, wanted, flags);
}}"""


def copying(size: str, first: str = "") -> str:
    """A driver whose copies do something else first, or carry fewer bytes."""
    return f"""{HEAD}
int cuMemcpyAsync(u64 to, u64 from, unsigned long size, void* stream) {{
  {first};
  return ((int (*)(u64, u64, unsigned long, void*))dlsym(RTLD_NEXT, "cuMemcpyAsync"))(to, from, {size}, stream);
}}"""


REFUSES, CRASHES, HANGS = creating("return 304"), creating("abort()"), creating("pause()")
SHORT = copying("size > 1 << 21 ? 1 << 21 : size")  # as if a driver looked at the first page alone
COARSE = f"""{HEAD}
int cuMemGetAllocationGranularity(unsigned long* size, struct prop* wanted, int option) {{
  *size = wanted->location == 3 ? 3 << 20 : 4096;
  return 0;
}}"""
FIRST = ("granularity", "host_pages")


def preflight(library: str, *names: str) -> dict[str, Any]:
    return run.preflight(device_choice.choose(Config(libcuda=library, device="cuda:0")), names)


def test_stand_in_differs_in_nothing() -> None:
    names = ("granularity", "host_pages", "copies", "several_handles", "graphs")
    report = preflight(device_choice.standin_library(), *names)
    assert {name: probe["status"] for name, probe in report["probes"].items()} == dict.fromkeys(names, "answered")
    assert (report["settings"], report["differences"]) == ({}, [])
    told = report["probes"]
    assert told["host_pages"]["facts"]["cpu_reads"] is True
    assert [told["copies"]["facts"][f"pages_{way}"]["right"] for way in ("to_device", "from_device")] == [True, True]
    assert "no cuMemHostAlloc" in told["copies"]["facts"]["allocated_to_device"]["error"]
    assert set(told["several_handles"]["facts"].values()) == {True}
    assert "no cuStreamBeginCapture" in told["graphs"]["facts"]["skipped"]


def within(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each probe has so many."""
    probes = {name: dataclasses.replace(probe, seconds=seconds) for name, probe in run.PROBES.items()}
    monkeypatch.setattr(run, "PROBES", probes)


def test_torch_is_asked_over_pages_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, 900)  # also on a machine that has much else to do
    report = preflight(device_choice.standin_library(), "torch_copies", "kernels")
    assert set(report["probes"]["torch_copies"]["facts"].values()) == {True}
    facts = report["probes"]["kernels"]["facts"]
    assert [facts[name]["equal"] for name in ("matmul_1", "matmul_512", "attention")] == [True] * 3


@pytest.mark.parametrize(
    ("source", "status", "why"),
    [(REFUSES, "answered", "304"), (CRASHES, "crashed", "SIGABRT"), (HANGS, "no end", "no end within 3 s")],
    ids=["refused", "crashes", "hangs"],
)
def test_host_pages_that_fail_are_not_used(
    source: str, status: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within(monkeypatch, 3)
    report = preflight(shim(tmp_path, source), *FIRST)
    assert report["probes"]["host_pages"]["status"] == status
    assert report["settings"] == {"host_pages": False}
    assert why in report["reasons"]["host_pages"]


def test_a_copy_over_several_pages_that_is_wrong_is_found(tmp_path: Path) -> None:
    report = preflight(shim(tmp_path, SHORT), "host_pages", "several_handles", "copies")
    assert report["probes"]["host_pages"]["facts"]["to_device"] is True, "a page alone is right"
    assert report["settings"] == {"host_pages": False}
    assert "several_handles, to_device: not the same bytes" in report["reasons"]["host_pages"]


def test_a_coarser_granularity_chooses_the_page_size(tmp_path: Path) -> None:
    report = preflight(shim(tmp_path, COARSE), "granularity")
    assert report["settings"] == {"page_size": 3 * PAGE}


# -- what the facts mean


def outcome(facts: dict[str, Any], status: str = "answered", said: str = "") -> dict[str, Any]:
    return {"status": status, "seconds": 1.0, "facts": facts, "said": said}


GOOD: dict[str, dict[str, Any]] = {
    "granularity": outcome({"device": PAGE, "host": PAGE}),
    "host_pages": outcome(
        dict.fromkeys(("create", "map", "open_for_both", "copied_there", "copied_back", "to_device"), True)
        | {"from_device": True}
    ),
    "copies": outcome(
        {
            f"{kind}_{way}": {"right": True, "gb_per_s": 50}
            for kind in ("pages", "allocated")
            for way in ("to_device", "from_device")
        }
    ),
    "several_handles": outcome({"to_device": True, "on_host": True}),
    "torch_copies": outcome({"host_to_device": True}),
    "kernels": outcome({"matmul_1": {"equal": True, "gb_per_s": 48}}),
    "graphs": outcome({"as_captured": True, "another_page": True, "host_page": True}),
    "torch_graphs": outcome(dict.fromkeys(("as_captured", "in_pieces", "on_host", "on_device"), True)),
}


def judged(name: str, facts: dict[str, Any], status: str = "answered", said: str = "") -> ProbeVerdict:
    """With one probe that told something else."""
    return judge({**GOOD, name: outcome({**GOOD[name]["facts"], **facts}, status, said)}, PAGE)


def test_where_nothing_differs_nothing_is_chosen() -> None:
    verdict = judge(GOOD, PAGE)
    assert (verdict.settings, verdict.differences) == ({}, [])
    assert all(answer.answer and answer.answer != "not asked" for answer in verdict.answers)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("host_pages", {"create": {"error": "cuMemCreate answered 304"}}),
        ("host_pages", {"copied_back": False}),
        ("host_pages", {"from_device": False}),
        ("host_pages", {"open_for_both": {"error": "1"}, "open_for_device": {"error": "801"}}),
        ("copies", {"pages_to_device": {"right": False}}),
        ("several_handles", {"on_host": {"error": "700"}}),
        ("torch_copies", {"host_to_device": False}),
        ("kernels", {"attention": {"equal": False, "gb_per_s": 1}}),
        ("graphs", {"host_page": False}),
        ("torch_graphs", {"on_host": False}),
    ],
)
def test_whatever_is_wrong_with_host_pages_turns_them_off(name: str, facts: dict[str, Any]) -> None:
    verdict = judged(name, facts)
    assert verdict.settings == {"host_pages": False}
    assert verdict.reasons["host_pages"] in [difference.found for difference in verdict.differences]


def test_slow_host_pages_are_told_and_change_nothing() -> None:
    verdict = judged("copies", {"pages_to_device": {"right": True, "gb_per_s": 20}})
    assert verdict.settings == {}
    assert [difference.found for difference in verdict.differences] == ["20 GB/s against 50"]


@pytest.mark.parametrize(
    ("name", "facts", "status", "why"),
    [
        ("graphs", {"another_page": False}, "answered", "graphs, another_page: not the same bytes"),
        ("torch_graphs", {"on_device": False}, "answered", "torch_graphs, on_device: not the same bytes"),
        ("torch_graphs", {"in_pieces": False}, "answered", "torch_graphs, in_pieces: not the same bytes"),
        (
            "torch_graphs",
            {"in_pieces_on_device": {"error": "700"}},
            "answered",
            "torch_graphs, in_pieces_on_device: 700",
        ),
        ("torch_graphs", {}, "crashed", "the probe torch_graphs crashed: died of SIGSEGV"),
    ],
)
def test_whatever_is_wrong_with_graphs_turns_them_off(name: str, facts: dict[str, Any], status: str, why: str) -> None:
    verdict = judged(name, facts, status, "died of SIGSEGV")
    assert (verdict.settings, verdict.reasons) == ({"graphs": False}, {"graphs": why})
    assert why in [difference.found for difference in verdict.differences]


def test_a_probe_that_broke_off_decides_nothing_unless_it_crashed_over_host_pages() -> None:
    verdict = judged("kernels", {}, "failed", "exit status 1\nModuleNotFoundError: No module named 'torch'")
    assert verdict.settings == {}
    assert [difference.effect for difference in verdict.differences] == ["ModuleNotFoundError: No module named 'torch'"]
    assert judged("copies", {}, "crashed", "died of SIGSEGV").settings == {}
    assert judged("kernels", {}, "crashed", "died of SIGSEGV").settings == {"host_pages": False}
    assert judged("kernels", {}, "no end", "no end within 120 s").settings == {}, "a slow machine, as likely"
    # All was right before the CPU looked at the page, which nothing needs.
    assert judged("host_pages", {}, "crashed", "died of SIGBUS").settings == {}


# -- what people are told


def shown(name: str, facts: dict[str, Any], capsys: pytest.CaptureFixture[str], **ended: str) -> str:
    """What is printed where one probe told something else."""
    verdict = dataclasses.asdict(judged(name, facts, **ended))
    probes = {**GOOD, name: outcome({**GOOD[name]["facts"], **facts}, **ended)}
    report.show({"key": {"device": "H200", "driver": "CUDA 13"}, "probes": probes, **verdict}, "the file")
    return " ".join(capsys.readouterr().out.split())


def test_a_preflight_that_finds_nothing_wrong_says_so_without_raw_keys(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown("copies", {}, capsys)
    assert "copies to and from them right, at 50 GB/s; memory that the driver allocates, 50 GB/s" in said
    assert "kernels that read them right, at 48 GB/s" in said
    assert said.endswith("works as ballonet assumes: install() needs no other settings. Kept in the file.")
    assert not re.search("[a-z]_[a-z]", said)


@pytest.mark.parametrize(
    ("name", "facts", "ended", "says"),
    [
        ("several_handles", {"from_device": False}, {}, "copies across several of them wrong: from the device"),
        ("torch_graphs", {"on_device": False}, {}, "torch's CUDA graphs, on the device: not the same bytes"),
        ("kernels", {}, {"status": "crashed", "said": "died of SIGSEGV"}, "probe of kernels that read them"),
        ("graphs", {"skipped": "no such call"}, {}, "CUDA graphs after a page moved not tried: no such call"),
        ("copies", {"pages_to_device": {"right": True, "gb_per_s": 20}}, {}, "What differs changes nothing in how"),
    ],
)
def test_a_preflight_that_finds_a_difference_names_it_without_raw_keys(
    name: str, facts: dict[str, Any], ended: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(name, facts, capsys, **ended)
    assert says in said
    assert not re.search("[a-z]_[a-z]|=False", said)


# -- what install() keeps to


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(device="cpu", budget=8 * PAGE, host_budget=8 * PAGE, cache_dir=tmp_path / "cache")


def kept(config: Config, **settings: Any) -> Path:
    key = findings.key_of(device_choice.choose(config).facts)
    assert config.cache_dir is not None
    report = {"settings": settings, "reasons": dict.fromkeys(settings, "because"), "when": "2026-01-01T00:00:00"}
    return findings.save(config.cache_dir, key, report)


def host_pages(config: Config) -> bool:
    device = device_choice.open_device(config)
    try:
        return device.host_pages
    finally:
        device.close()


def test_chosen_settings_are_kept_to_unless_somebody_says_otherwise(config: Config) -> None:
    assert host_pages(config)
    kept(config, host_pages=False, page_size=PAGE // 2)
    assert not host_pages(config)
    assert host_pages(dataclasses.replace(config, host_pages=True))
    device = device_choice.open_device(config)
    assert device.page_size == PAGE // 2
    range_ = device.reserve(PAGE, "weights", device.group())
    with pytest.raises(Exception, match="host"):
        range_.map_host(0, 1)
    range_.close()
    device.close()


def test_graphs_are_used_unless_a_preflight_found_them_wrong(config: Config) -> None:
    facts = device_choice.choose(config).facts

    def why(**given: Any) -> str:
        return findings.why_no_graphs(dataclasses.replace(config, **given), facts)

    assert (why(), why(graphs=False)) == ("", "turned off (BALLONET_GRAPHS)")
    kept(config, host_pages=False)
    assert why() == ""
    kept(config, graphs=False)
    assert why() == "a preflight found graphs wrong: because"
    assert why(graphs=True) == ""
    runtime = devices.start(config, number=7)
    try:
        assert runtime.why_no_graphs == why()
    finally:
        devices.stop(7)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}'])
def test_a_file_that_is_not_whole_says_nothing(config: Config, text: str) -> None:
    kept(config, host_pages=False).write_text(text)
    assert host_pages(config)


FOREIGN: dict[str, Callable[[dict[str, Any]], object]] = {
    "another driver": lambda found: found["key"].update(driver="CUDA 12000"),
    "another format": lambda found: found.update(format=2),
    "no such setting": lambda found: found["settings"].update(budget=1),
    "no truth": lambda found: found["settings"].update(host_pages="no"),
    "no number": lambda found: found["settings"].update(page_size=True),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_findings_of_another_machine_say_nothing(config: Config, change: Callable[[dict[str, Any]], object]) -> None:
    path = kept(config, host_pages=False)
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))
    assert host_pages(config)


def test_the_key_has_the_driver_s_own_version(tmp_path: Path) -> None:
    nvidia = tmp_path / "version"
    nvidia.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 12\n")
    facts = {"kind": "cuda", "name": "H200", "total_memory": 1, "driver_version": 13000}
    assert findings.key_of(facts, nvidia)["driver"] == "CUDA 13000, 580.95.05"
    assert findings.key_of(facts, tmp_path / "none")["driver"] == "CUDA 13000"


def test_info_says_what_was_chosen(config: Config) -> None:
    def checks() -> dict[str, tuple[bool, str]]:
        return {check["name"]: (check["works"], check["detail"]) for check in info.gather(config, "0")["checks"]}

    assert not checks()["preflight"][0]
    kept(config, host_pages=False)
    assert checks()["host pages at device addresses"] == (False, "because")
    assert "host_pages=False" in checks()["preflight"][1]


def test_the_command_writes_keeps_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PROBES", {name: run.PROBES[name] for name in ("granularity", "host_pages")})
    monkeypatch.setattr(run.preflight, "__defaults__", (("granularity", "host_pages"), lambda name: None))
    monkeypatch.setenv("BALLONET_LIBCUDA", shim(tmp_path, REFUSES))
    monkeypatch.setenv("BALLONET_CACHE_DIR", str(tmp_path / "cache"))
    assert __main__.main(["preflight", "--out", str(tmp_path / "out.json"), "--no-save"]) == 0
    assert not (tmp_path / "cache").exists()
    assert __main__.main(["preflight"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "pages in host memory wrong: create (" in said
    assert "host_pages" not in said
    assert said.endswith("no layer streams, nothing spills, and KV stays on the device.")
    assert "install() goes round that from now on (" in said
    assert __main__.main(["preflight", "--no-save", "--verbose"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "chosen: host_pages = False (" in said
    assert json.loads((tmp_path / "out.json").read_text())["settings"] == {"host_pages": False}
    (saved,) = (tmp_path / "cache").glob("preflight-*.json")
    assert json.loads(saved.read_text())["settings"] == {"host_pages": False}


def test_facts_that_were_told_before_a_line_was_cut_off_count() -> None:
    assert run._facts(io.StringIO('{"fact": "first", "value": 1}\nwarning\n{"fact": "second", "va')) == {"first": 1}


def test_a_probe_that_is_cut_off_for_want_of_time_did_not_hang(tmp_path: Path) -> None:
    library = shim(tmp_path, HANGS)
    for left in (1.0, 0.0):
        outcome = run.run_probe("host_pages", library, 0, left)
        assert (outcome.status, outcome.said) == ("failed", "no time was left")
