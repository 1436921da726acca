"""The report: what it works out from plain numbers, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ballonet.hooks.measure.pace import Measured
from ballonet.hooks.measure.report import Report, Times, interval_of
from ballonet.hooks.options import ManageOptions
from ballonet.offload.manager.kv_read_plan import Streamed
from ballonet.offload.policy.kv_pages import Way
from ballonet.offload.policy.plan import Plan, at_interval, spread, streaming
from ballonet.offload.record.record import Point

PAGE = 1000
PAGES = (10,) * 32
RATE = 10 * PAGE / 0.004  # bytes per second: a layer comes over in 4 ms


def report(plan: Plan, **changes: Any) -> Report:
    """A layer computes in 1 ms to decode, in 20 ms to prefill."""
    known: dict[str, Any] = {
        "bandwidth": RATE,
        "resident": {"decode": 0.032, "prefill": 0.64},
        "last": {"decode": Measured(Point("decode", 1, 9), 0.032, 0.033, 0.066, 0.07)},
        "slos": {"decode": 0.065},
        "link_bytes": 123456,
        "file_bytes": 0,
        "host_bytes": 160 * PAGE,
        "why": "the KV cache asked for it",
    }
    return Report.of("Tiny", plan, PAGE, **(known | changes))


def test_report_has_the_costs_and_gains_of_a_plan() -> None:
    shown = report(at_interval(PAGES, 2))
    assert (shown.layers, len(shown.streamed), shown.slots, shown.interval) == (32, 16, 2, 2)
    assert shown.freed_pages == (16 - 2) * 10
    assert shown.token_bytes == 16 * 10 * PAGE
    decode, prefill = shown.times["decode"], shown.times["prefill"]
    assert decode.predicted == pytest.approx(16 * 0.004), "max(n, m r) layers"
    assert decode.predicted_stall == pytest.approx(16 * 0.004 - 0.032)
    assert (decode.measured, decode.measured_stall, decode.between) == (0.066, 0.033, 0.07)
    assert prefill.predicted == pytest.approx(0.64)
    assert prefill.predicted_stall == pytest.approx(0)
    assert (prefill.measured, prefill.met) == (None, None)
    assert [*shown.times] == ["prefill", "decode"]


def test_time_in_the_driver_is_shown_where_there_is_some() -> None:
    last = Measured(Point("decode", 1, 9), 0.032, 0.033, 0.066, 0.07, 0.0033)
    shown = report(at_interval(PAGES, 2), last={"decode": last})
    assert shown.times["decode"].driver == 0.0033
    assert "token, driver calls  3.3 ms, 5.0% of what was measured" in " ".join(str(shown).split("\n"))
    assert "driver" not in str(report(at_interval(PAGES, 2)))


def test_predicted_is_what_the_plan_copies() -> None:
    """One of three layers in two slots stays where it is; each of the others computes in 1 ms and leaves its slot to
    the next, which takes 20 ms. A model whose layers all stay is as fast as a resident one."""
    shown = report(streaming(PAGES, spread(PAGES, 3), 2), bandwidth=RATE / 5)
    assert shown.token_bytes == 2 * 10 * PAGE
    decode = shown.times["decode"]
    assert decode.predicted == pytest.approx(0.021 + 0.021)
    assert decode.predicted_stall == pytest.approx(0.010)
    both = report(streaming(PAGES, spread(PAGES, 2), 2), bandwidth=RATE / 100)
    assert both.times["decode"].predicted == both.times["decode"].resident == 0.032
    unknown = report(streaming(PAGES, spread(PAGES, 2), 2), bandwidth=None)
    assert unknown.times["decode"].predicted == 0.032, "nothing comes over the link"


def test_an_slo_is_kept_as_measured_or_else_as_predicted() -> None:
    slow = report(at_interval(PAGES, 2))
    assert slow.times["decode"].met is False, "66 ms were measured"
    assert report(at_interval(PAGES, 2), last={}).times["decode"].met is True, "64 ms are predicted"
    assert report(at_interval(PAGES, 2), last={}, resident={}).times["decode"].met is None
    assert report(at_interval(PAGES, 2), slos={}).times["decode"].met is None


def test_unknown_times_are_not_shown() -> None:
    shown = report(at_interval(PAGES, 2), bandwidth=None, last={})
    assert shown.times["decode"] == Times(resident=0.032, slo=0.065)
    assert "GB/s" not in str(shown)
    still = report(Plan(PAGES), bandwidth=None, link_bytes=0, host_bytes=0, why="")
    assert still.times["decode"].predicted == 0.032, "nothing comes over the link"
    assert (still.freed_pages, still.interval, still.token_bytes) == (0, None, 0)
    assert not any(word in str(still) for word in ("freed", "link", "backing store", "why"))


@pytest.mark.parametrize("layers", [1, 2, 7, 32, 33])
def test_the_interval_of_a_plan(layers: int) -> None:
    for interval in range(1, layers + 1):
        assert interval_of(at_interval((1,) * layers, interval)) == interval
        even = spread((1,) * layers, layers // interval)
        if layers % interval == 0 and interval < layers:
            assert interval_of(streaming((1,) * layers, even, 2)) == interval
    assert interval_of(Plan((1,) * layers)) is None
    assert interval_of(streaming(PAGES, (0, 1, 31), 2)) is None
    assert interval_of(streaming(PAGES, (0, 1), 2)) is None
    assert interval_of(streaming((1,) * 11, (0, 3, 7), 2)) is None, "3, 4 and 4 apart"
    assert interval_of(streaming(PAGES, (4, 12, 20, 28), 2)) == 8, "wherever it begins"


def test_report_is_shown_line_by_line() -> None:
    text = str(report(at_interval(PAGES, 2)))
    for words in (
        "32, 16 of them streamed through 2 slots (interval 2)",
        "140 (136.72KiB)",
        "64 ms, of which 32 ms wait for copies",
        "66 ms, of which 33 ms wait for copies",
        "token to token      70 ms",
        "65 ms, not kept",
        "156.25KiB per iteration, 0.0025 GB/s",
        "120.56KiB",
        "0B in files, 156.25KiB in host memory",
        "the KV cache asked for it",
    ):
        assert words in text
    assert "layers 0, 1, 31" in str(report(streaming(PAGES, (0, 1, 31), 1)))
    assert "1 slot (" in str(report(streaming(PAGES, (0, 1, 31), 1)))


def test_how_kv_on_the_host_is_read() -> None:
    through = Streamed(Way.STREAMED, away=2**10, slots=2, slot_pages=16, copied=2**30, exposed=0.002)
    text = str(report(at_interval(PAGES, 2), kv=(through, Streamed(Way.ZERO_COPY, 1, 0, 0, 0, 0.0))))
    assert "1000KiB, through slots 2 of 15.62KiB, 2 ms exposed in each iteration; 1GiB so far" in text
    assert "1000B, in place; 0B so far" in text
    assert "KV" not in str(report(Plan(PAGES), kv=(Streamed(Way.RESIDENT, 0, 0, 0, 0, 0.0),), why=""))
    assert report(at_interval(PAGES, 2), kv=(through,)).as_dict()["kv"][0]["way"] == "through slots"


def test_a_notebook_shows_the_same() -> None:
    class Cells(HTMLParser):
        def handle_data(self, data: str) -> None:
            cells.append(data)

    cells: list[str] = []
    shown = replace(report(at_interval(PAGES, 2)), why="<b>because</b>")
    Cells().feed(shown._repr_html_())
    for line in str(shown).splitlines()[1:]:
        name, value = line.strip().split("  ", 1)
        assert name in cells
        assert value.strip() in cells


def test_where_a_model_is_and_with_what_it_is_managed() -> None:
    options = ManageOptions(priority=2, prefix_dir=Path("/var/prefixes"))
    shown = replace(
        report(at_interval(PAGES, 2)),
        pages=3,
        host_pages=2,
        unmanaged_tensors={"lm_head.weight": "no room"},
        options=options,
    )
    text = " ".join(str(shown).split())
    assert "weights 3 pages (2.93KiB), 2 pages (1.95KiB) on the host" in text
    assert "unmanaged: lm_head.weight no room" in text
    facts = json.loads(json.dumps(shown.as_dict()))
    assert (facts["pages"], facts["host_pages"], facts["released"]) == (3, 2, False)
    assert facts["unmanaged_tensors"] == {"lm_head.weight": "no room"}
    assert (facts["options"]["priority"], facts["options"]["prefix_dir"]) == (2, "/var/prefixes")
    assert str(replace(shown, released=True)).splitlines()[1:] == ["  managed  no more"]
