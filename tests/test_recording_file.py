"""A recording as a file: the numbers, the trace, and a page that needs nothing else and runs nothing that it shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballonet.allocator.errors import ConfigError
from ballonet.allocator.events import Events, LoggedEvent
from ballonet.offload.timeline import file as recording_file
from ballonet.offload.timeline.series import SeriesRecording

PAGE = 4096
EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028&amp;\ud800"


def recorded(*events: LoggedEvent) -> SeriesRecording:
    log = Events()
    for event in events:
        log.add(event)
    rows = ((1000, 0, 0, 0, 0, 0), (2000, 1, 2, 0, 3, 0), (5000, 1, 2, 0, 4, 0))
    levels = ((1000, 9 * PAGE, 0), (3000, 7 * PAGE, 2))
    return SeriesRecording(1000, 10_001_000, 1.5e9, PAGE, rows, levels, events, log.counts(), 6)


MADE = LoggedEvent(3000, "idle weights", "pull", 3, "llama, layer 2", "MainThread", 0.25, inf)


def test_the_numbers_are_in_seconds_from_the_beginning() -> None:
    told = json.loads(recording_file.as_json(recorded(MADE)))
    assert told["rows"] == [[0, 0, 0, 0, 0, 0], [1e-6, 1, 2, 0, 3, 0], [4e-6, 1, 2, 0, 4, 0]]
    assert told["owners"] == ["free", "weights", "activations", "kv", "retiring"]
    assert told["levels"] == [[0, 9 * PAGE, 0], [2e-6, 7 * PAGE, 2]]
    assert (told["seconds"], told["page_size"], told["missing"], told["began"]) == (0.01, PAGE, 6, 1.5e9)
    assert told["events"] == [
        {
            "when": 2e-6,
            "lever": "idle weights",
            "verb": "pull",
            "pages": 3,
            "what": "llama, layer 2",
            "by": "MainThread",
            "predicted": 0.25,
            "measured": None,
        }
    ]
    assert told["counts"]["idle weights"]["pull"] == {"events": 1, "pages": 3, "seconds": None}


def test_the_trace_has_a_counter_per_owner_and_an_instant_per_decision() -> None:
    trace = json.loads(recording_file.as_trace(recorded(MADE)))
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in events)
    counters: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append((event["ts"], event["args"]["value"]))
    assert counters == {
        "free, bytes": [(0, 0), (1, PAGE)],
        "weights, bytes": [(0, 0), (1, 2 * PAGE)],
        "activations, bytes": [(0, 0)],
        "kv, bytes": [(0, 0), (1, 3 * PAGE), (4, 4 * PAGE)],
        "retiring, bytes": [(0, 0)],
        "budget, bytes": [(0, 9 * PAGE), (2, 7 * PAGE)],
        "on the host, bytes": [(0, 0), (2, 2 * PAGE)],
    }
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["s"]) == ("idle weights: pull", 2, "p")
    assert instant["args"]["by"] == "MainThread"
    assert instant["args"]["pages"] == 3


class Document(HTMLParser):
    """What a browser would make of the page: its elements, its scripts, and where it would reach out to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


EMPTY = Document(recording_file.as_page(recorded()))


@settings(max_examples=10)
@example(EVIL, EVIL, nan)
@given(st.text(), st.text(), st.floats() | st.none())
def test_no_name_gets_out_of_the_data_of_the_page(name: str, by: str, seconds: float | None) -> None:
    event = LoggedEvent(3000, name, by, 3, name, by, seconds, seconds)
    page = recording_file.as_page(recorded(event))
    page.encode("utf-8")
    document = Document(page)
    assert document.tags == EMPTY.tags
    data, script = document.scripts
    assert not set("<>&") & set(data), "a browser ends a script at more than `</script>`"
    assert script == EMPTY.scripts[1]
    (told,) = json.loads(data)["events"]
    assert (told["lever"], told["by"], told["what"]) == (name, by, name)


def test_the_page_needs_nothing_else() -> None:
    page = recording_file.as_page(recorded(MADE))
    document = Document(page)
    for tag, attributes in document.tags:
        assert tag not in {"link", "img", "iframe", "object", "base"}
        assert not {"src", "href", "srcset", "action"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    (policy,) = [attributes["content"] for _, attributes in document.tags if attributes.get("http-equiv") is not None]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "{{" not in page
    script = document.scripts[1]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|import\(|XMLHttp", script
    )
    assert re.findall(r"https?://[^\"\s]+", page) == ["http://www.w3.org/2000/svg"], "a name, not an address"
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.html", "<!doctype html>"),
        ("a.JSON", '{"began"'),
        ("a.trace.json", '{"traceEvents"'),
        ("a.perfetto", '{"traceEvents"'),
    ],
)
def test_the_suffix_decides(tmp_path: Path, name: str, begins: str) -> None:
    path = tmp_path / name
    recording_file.check(str(path))
    recording_file.write(recorded(MADE), str(path))
    assert path.read_text(encoding="utf-8").startswith(begins)


def test_a_failure_to_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(recording_file.os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        recording_file.write(recorded(MADE), str(path))
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("path", ["a", "a.json.gz", ""])
def test_any_other_suffix_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"none of the suffixes of a timeline: \.trace\.json, "):
        recording_file.check(path)


# -- the script of the page, where there is something to run it with

CHECKS = """
const COUNT = (events, pages, seconds) => ({ events, pages, seconds });
const REFUSED = times => times.map(when => ({ ...EVENT, lever: "refuse", when }));
const rows = [[0,0,1,0,0,0], [1,0,2,0,0,0], [1.5,0,9,0,0,0], [1.6,0,3,0,0,0], [9,0,4,0,0,0]];
const told = {
  view: inView(rows, 0.5, 10, 100), thin: inView(rows, 0, 10, 5 - 1), late: inView(rows, 9.5, 10, 10),
  ticks: ticks(0, 7 * 2 ** 30, 6, true), seconds: ticks(1.3, 2.2, 4, false), none: ticks(3, 3, 4, false),
  bytes: [bytes(0), bytes(1536), bytes(3 * 2 ** 30)],
  times: [duration(null), duration(0.25), duration(2), duration(3e-6)],
  upTo: [upTo(rows, 1, r => r[0]), upTo(rows, -1, r => r[0]), upTo(rows, 99, r => r[0])],
  match: [matches(EVENT, "", ""), matches(EVENT, "spill", "")].concat(
    [matches(EVENT, "", "LLAMA main"), matches(EVENT, "", "x")]),
  sentence: sentence(EVENT, 4096),
  collapsed: collapsed(REFUSED([0, .4, .9, 5]).concat(EVENT, EVENT)).map(each => each.times),
  repeated: sentence(collapsed(REFUSED([0, .5]))[0], 4096),
  quiet: story({ events: [{ ...EVENT, lever: "budget" }], counts: { budget: { set: COUNT(1, 9, 2) } } }),
  short: story({ page_size: 4096, events: [{ ...EVENT, lever: "spill", when: 5.04 }],
    counts: { spill: { pull: COUNT(2, 512, 3.4) }, refuse: { pull: COUNT(39, 1, 0) } } }),
};
console.log(JSON.stringify(told));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the page's script with")
def test_the_functions_of_the_page(tmp_path: Path) -> None:
    script = Document(recording_file.as_page(recorded())).scripts[1]
    event = json.loads(recording_file.as_json(recorded(MADE)))["events"][0]
    (tmp_path / "page.js").write_text(f"{script}\nconst EVENT = {json.dumps(event)};{CHECKS}")
    done = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row[:3] for row in told["view"]] == [[0.5, 0, 1], [1, 0, 2], [1.5, 0, 9], [1.6, 0, 3], [9, 0, 4]]
    assert [row[:3] for row in told["thin"]] == [[0, 0, 9], [7.5, 0, 4]], "of a column its fullest row"
    assert [row[:3] for row in told["late"]] == [[9.5, 0, 4]], "what was in force before"
    assert told["ticks"] == [gib * 2**30 for gib in (0, 2, 4, 6)]
    assert told["seconds"] == pytest.approx([1.5, 2.0])
    assert told["none"] == [3]
    assert told["bytes"] == ["0 B", "1.5 KiB", "3 GiB"]
    assert told["times"] == ["", "250 ms", "2 s", "3 µs"]
    assert told["upTo"] == [2, 0, 5]
    assert told["match"] == [True, False, True, False]
    assert told["collapsed"] == [3, 1, 1, 1], "only refusals that repeat are one"
    assert ", 2 times within 500 ms" in told["repeated"]
    assert told["quiet"] == "Memory was never short."
    assert told["short"] == (
        "Memory was short from 5.04 s on; 2 MiB lay on pages of the host for want of others; 3.4 s went into moving; "
        "39 requests found no page at first (they waited, lay on the host, or failed)."
    )
    assert told["sentence"] == (
        "idle weights: taken 3 pages (12 KiB), of llama, layer 2, asked by MainThread, predicted 250 ms"
    )
