"""The performance record of a model: measured with a clock that is set by hand, kept in a file, shown."""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import devices, install
from ballonet.allocator.config import Config, parse_size
from ballonet.allocator.errors import BudgetError, ManageError
from ballonet.hooks import profile
from ballonet.hooks.device.key import key_for, key_of
from ballonet.hooks.device.streams import HostMarks
from ballonet.hooks.managed import pace_of, residency_of
from ballonet.hooks.measure.pace import Pace, point_of
from ballonet.hooks.plan import needs, planner
from ballonet.hooks.profile import Grid, load_or_measure, measured, streaming_some
from ballonet.hooks.programs import facts as profile_facts
from ballonet.offload.policy.plan import Costs
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record import link, record
from ballonet.offload.record.record import Point, Record, load

from .models import build, prompts
from .pool import bytes_that_exist, take_out
from .tuned import Tuned

BUDGET, PAGE = 2**23, 4096
EMPTY = Record({}, 1.0)
SMALL = Grid(batch=1, length=8)


@pytest.fixture
def llama() -> Any:
    return build("llama", num_hidden_layers=2)


class Slow:
    """A model with a pace whose forwards take as long as they have sequences times tokens, in ms, and wait besides.

    `fails`: sequences for which there is no memory. `calls` of `generate()` were made so far.
    """

    def __init__(self, model: Any, fails: int = 99) -> None:
        self.now = 0.0
        self.calls: list[tuple[int, int]] = []
        self.fails = fails
        self.pace = Pace(HostMarks(self), self)
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        model.register_forward_hook(lambda *_: self.pace.end(), always_call=True)

    def __call__(self) -> int:
        return round(self.now * 1e9)

    def begin(self, _: Any, args: Any, kwargs: Any) -> None:
        point = point_of(args, kwargs)
        assert point is not None
        if point.phase == "prefill":
            self.calls.append(point[1:])
        self.pace.begin(point)
        first = self.calls.count(self.calls[-1]) == 1
        self.now += 1e-3 * point.batch * point.length * (1000 if first else 1)
        with self.pace.waiting():
            self.now += 5
        if point.batch >= self.fails:
            raise torch.OutOfMemoryError("no room")


# -- what is measured


def test_sizes_are_powers_of_two_the_least_work_first() -> None:
    assert Grid(4, 300).sizes() == [
        (1, 64), (1, 128), (2, 64), (1, 256), (2, 128), (4, 64), (2, 256), (4, 128), (4, 256),
    ]  # fmt: skip
    assert Grid(3, 4096).sizes(longest=256) == [(1, 64), (1, 128), (2, 64), (2, 128)], "there is room for the answer"
    assert Grid(1, 9).sizes() == [(1, 8)]
    assert Grid(1, 100).sizes(longest=2) == [(1, 1)]


def test_the_median_of_what_is_left_without_stalls_and_without_the_first(llama: Any) -> None:
    slow = Slow(llama)
    timed, left = measured(llama, slow.pace, EMPTY, Grid(2, 64))
    assert left == {}
    assert set(timed.seconds) == {Point(phase, batch, 64) for phase in ("prefill", "decode") for batch in (1, 2)}  # type: ignore[arg-type]
    for batch in (1, 2):
        assert timed.seconds[Point("prefill", batch, 64)] == pytest.approx(batch * 0.064)
        steps = [batch * 0.001 * (64 + step) for step in range(Grid().tokens - 1)]
        assert timed.seconds[Point("decode", batch, 64)] == pytest.approx(sum(steps) / len(steps))
        assert slow.calls.count((batch, 64)) == 1 + Grid().rounds


def test_host_time_of_a_streamed_layer_is_what_a_step_takes_longer_for_each(llama: Any) -> None:
    slow, streams = Slow(llama), 0

    def enter_layers(_: Any) -> None:
        slow.now += 0.25 * streams

    llama.model.layers[0].register_forward_pre_hook(lambda *_: enter_layers(_))

    @contextmanager
    def some() -> Iterator[int]:
        nonlocal streams
        streams = 3
        yield streams
        streams = 0

    known, _ = measured(llama, slow.pace, EMPTY, Grid(1, 64))
    assert profile.measured_entering(llama, slow.pace, known, Grid(1, 64), some()) == pytest.approx(0.25)
    assert profile.measured_entering(llama, slow.pace, known, Grid(1, 64), nullcontext(0)) == 0.0


def test_decoding_is_measured_as_generate_runs_it(llama: Any) -> None:
    """By pieces: the first step of each call is recorded, and so not timed."""
    slow = Slow(llama)

    def runs(_: Any, args: Any, kwargs: Any) -> None:
        point = point_of(args, kwargs)
        if point is not None and point.phase == "decode":
            assert slow.pace.listeners, "each of them counts"
            slow.pace.forget() if point.length == 64 else slow.pace.replayed()

    llama.register_forward_pre_hook(runs, with_kwargs=True)
    timed, left = measured(llama, slow.pace, EMPTY, Grid(1, 64))
    assert left == {}
    assert set(timed.seconds) == {Point("prefill", 1, 64), Point("pieces", 1, 64)}
    assert timed.decoding == "pieces"
    assert measured(llama, Slow(llama).pace, timed, Grid(1, 64))[0].seconds == timed.seconds, "nothing is missing"


def test_sizes_that_do_not_fit_are_left_out_and_said(llama: Any) -> None:
    slow = Slow(llama, fails=2)
    timed, left = measured(llama, slow.pace, EMPTY, Grid(4, 128))
    assert {point[1:] for point in timed.seconds} == {(1, 64), (1, 128)}
    assert set(left) == {(2, 64), (2, 128), (4, 64), (4, 128)}
    assert set(left.values()) == {"it does not fit in memory"}
    assert {size for size in slow.calls if size[0] > 1} == {(2, 64)}, "what is larger is not tried"
    with pytest.raises(ManageError, match="does not fit in memory"):
        measured(llama, Slow(llama, fails=1).pace, EMPTY, Grid(1, 64))


def test_measuring_ends_when_the_time_is_over(llama: Any) -> None:
    slow = Slow(llama)
    timed, left = measured(llama, slow.pace, EMPTY, Grid(2, 128, seconds=7), clock=lambda: slow.now)
    assert {point[1:] for point in timed.seconds} == {(1, 64)}, "the first is always measured"
    assert set(left.values()) == {"it takes longer than the 7 seconds in all"}
    ticks = iter(range(99))
    timed, _ = measured(llama, slow.pace, EMPTY, Grid(2, 64, seconds=0), clock=lambda: next(ticks))
    assert {point[1:] for point in timed.seconds} == {(1, 64)}


def test_random_numbers_of_the_caller_are_his(llama: Any) -> None:
    slow = Slow(llama)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    measured(llama, slow.pace, EMPTY, SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_that_generates_no_text_is_refused() -> None:
    still = Pace(HostMarks())
    with pytest.raises(ManageError, match="generates no text"):
        measured(nn.Linear(2, 2), still, EMPTY, SMALL)
    with pytest.raises(ManageError, match="generates no text"):
        measured(build("whisper"), still, EMPTY, SMALL)
    with pytest.raises(ManageError, match="are not those of a known kind"):
        measured(build("llama", num_hidden_layers=1), still, EMPTY, SMALL)


# -- the file


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield
    gc.collect()
    devices.require().check()
    assert bytes_that_exist() <= BUDGET
    take_out()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> Path:
    """Where records are kept."""
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    monkeypatch.setattr(profile, "cache_dir", lambda settings: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def model(installed: None, folder: Path) -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=2)


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("record-*"))


def test_a_record_is_measured_once(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.require()
    with ballonet.manage(model) as managed:
        first = load_or_measure(model, pace_of(managed), device, SMALL)
        assert (first.reused, first.left) == (False, {})
        assert set(first.record.seconds) == {Point("prefill", 1, 8), Point("decode", 1, 8)}
        (path,) = records(folder)
        assert load(path, first.record.key) == first.record
        generate = model.generate
        monkeypatch.setattr(model, "generate", None)
        assert load_or_measure(model, pace_of(managed), device) == profile.Profile(first.record, path, True, {})
        assert load_or_measure(model, pace_of(managed), device, SMALL).reused
        monkeypatch.setattr(model, "generate", generate)
        more = load_or_measure(model, pace_of(managed), device, Grid(2, 8))
        assert not more.reused
        assert more.record.seconds.items() > first.record.seconds.items()
        anew = load_or_measure(model, pace_of(managed), device, SMALL, force=True)
        assert set(anew.record.seconds) == set(first.record.seconds)
        assert load(path, anew.record.key) == anew.record


def test_layers_that_stream_for_a_measurement_are_resident_again(installed: None, folder: Path) -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=4)
    with ballonet.manage(model) as managed:
        residency, seen = residency_of(managed), list[tuple[int, ...]]()
        model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(residency.plan.streamed))
        timed = load_or_measure(model, pace_of(managed), devices.require(), SMALL, residency=residency)
        assert set(seen) == {(), (3,)}
        assert timed.record.entering >= 0
        assert load(timed.path, timed.record.key) == timed.record
        assert residency.plan.streamed == ()
        devices.require().check()
        with streaming_some(residency, 5) as count:
            assert count == 0, "none of four"
    with ballonet.manage(model, interval=2) as managed, streaming_some(residency_of(managed), 1) as count:
        assert count == 2, "beside those that do"


def test_a_model_that_keeps_prefixes_is_measured_without_them(model: Any, folder: Path) -> None:
    """A prompt that was seen before would have a prefill of one token, which is a decode step."""
    with ballonet.manage(model, prefix_cache=True, tpot_slo="60s") as managed:
        assert set(load_or_measure(model, pace_of(managed), devices.require(), SMALL).record.seconds) >= {
            Point("prefill", 1, 8),
            Point("decode", 1, 8),
        }
        store = managed.prefixes
        assert store is not None
        assert store.counts.requests == 0, "what is measured is not kept for prompts of users"
        model.generate(**prompts(1, 9), max_new_tokens=2)
        assert store.counts.requests == 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[:-40], "cannot be read"),  # and what else load() refuses: test_record.py
        (None, "measured for another driver, link"),
    ],
)
def test_a_file_that_cannot_be_used_is_measured_anew_with_a_notice(
    model: Any, folder: Path, damage: Any, says: str, recwarn: pytest.WarningsRecorder
) -> None:
    device = devices.require()
    with ballonet.manage(model) as managed:
        timed = load_or_measure(model, pace_of(managed), device, SMALL)
        assert not list(recwarn), "the first one is nothing to warn of"
        if damage is None:
            other = {**timed.record.key, "driver": "older", "link": "narrower"}
            record.save(replace(timed.record, key=other), timed.path)
        else:
            timed.path.write_text(damage(timed.path.read_text()))
        with pytest.warns(RuntimeWarning, match=f"LlamaForCausalLM is measured anew: .*{says}"):
            assert not load_or_measure(model, pace_of(managed), device, SMALL).reused
        recwarn.clear()
        assert load_or_measure(model, pace_of(managed), device, SMALL).reused
        assert not list(recwarn)
        assert records(folder) == [timed.path]


def test_a_folder_that_cannot_be_written_to(model: Any, folder: Path) -> None:
    folder.write_text("a file")
    with ballonet.manage(model) as managed:
        with pytest.warns(RuntimeWarning, match="cannot be kept in"):
            timed = load_or_measure(model, pace_of(managed), devices.require(), SMALL)
        assert timed.record.seconds


def test_a_link_that_cannot_be_measured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "measure", lambda device: None)
    with ballonet.manage(model) as managed, pytest.raises(ManageError, match="cannot be measured"):
        load_or_measure(model, pace_of(managed), devices.require(), SMALL)


# -- what it is for


def test_key_of_a_record_changes_with_model_and_machine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.require()
    key = key_of(model, device)
    assert set(key) == {"model", "size", "device", "driver", "link", "torch", "transformers", "ballonet"}
    assert all(isinstance(value, str) and value for value in key.values())
    other = copy.deepcopy(model)
    other.config._name_or_path = "elsewhere"
    assert key_of(other, device) == key
    for change in (
        lambda it: it.half(),
        lambda it: it.model.layers.pop(1),
        lambda it: setattr(it.config, "hidden_act", "relu"),
        lambda it: setattr(it.config, "_attn_implementation", "eager"),
    ):
        changed = copy.deepcopy(model)
        change(changed)
        assert key_of(changed, device)["model"] != key["model"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key_of(model, device)["device"] != key["device"]


def test_a_gpu_is_named_with_its_driver_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda ordinal: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda ordinal: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(link, "driver", {"GPU-abc": "580.65"}.get)
    monkeypatch.setattr(link, "described", {"GPU-abc": "PCIe 5 x16"}.get)
    key = key_for(nn.Linear(2, 2), "cuda", 0, Config())
    assert (key["device"], key["driver"], key["link"]) == ("H200", "580.65", "PCIe 5 x16")
    monkeypatch.setattr(link, "driver", lambda uuid: "")
    monkeypatch.setattr(link, "described", lambda uuid: "")
    key = key_for(nn.Linear(2, 2), "cuda", 0, Config())
    assert key["driver"].startswith("CUDA")
    assert key["link"] == "not known"


# -- the command


@pytest.fixture
def saved(installed: None, folder: Path, tmp_path: Path) -> str:
    """A folder with a tiny model."""
    with install.stock():
        build("llama", num_hidden_layers=4).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_the_command(saved: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", saved, "--batch", "2", "--length", "8", "--json", "--tpot-slo", "80ms"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["model"], facts["reused"], facts["left"]) == ("LlamaForCausalLM", False, [])
    assert len(facts["layers"]) == 4
    assert {(fact["phase"], fact["batch"], fact["length"]) for fact in facts["points"]} == {
        (phase, batch, 8) for phase in ("prefill", "decode") for batch in (1, 2)
    }
    for fact in facts["points"]:
        page_seconds = facts["page_size"] / facts["bandwidth"]
        costs = Costs(tuple(facts["layers"]), fact["seconds"], page_seconds, facts["entering"])
        assert fact["ratio"] == pytest.approx(float(costs.ratio))
        fast = [i for i in range(1, costs.none + 1) if costs.time(i) <= (1 + DEFAULT.prices.hidden) * fact["seconds"]]
        assert fact["hidden"] == fast[0]
    (slo,) = facts["slos"]
    assert (slo["phase"], slo["slo"], slo["listed"]) == ("decode", 0.08, pytest.approx(0.08))
    assert [row[:2] for row in slo["intervals"]] == [[1, 8], [2, 8]]

    assert main(["profile", saved, "--batch", "1", "--length", "8", "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] is False
    assert main(["profile", saved, "--ttft-slo", "1us", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "Read from" in shown
    assert "GB/s" in shown
    assert "hidden at interval" in shown
    assert "0.001 ms, prefill:" in shown
    assert re.search(r"^ +1 +no *$", shown, re.MULTILINE), "no interval meets that"
    assert str(records(folder)[0]) in shown.replace("\n", "")


def test_a_profile_ends_in_which_budget_fits_and_how_fast_that_is(
    saved: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "cache_dir", lambda settings: folder)
    assert main(["profile", saved, "--batch", "1", "--length", "8"]) == 0
    said = capsys.readouterr().out
    assert "hidden" not in said
    last = " ".join(said.strip().rpartition("\n\n")[2].split())
    sizes = re.match(
        r"One sequence of 9 tokens fits into the budget of 8MiB, with all 4 layers on the device\. It needs "
        r"(\S+) at least; with (\S+) nothing comes from host memory\. A token takes .* \(counted from what was "
        r"measured\)\.$",
        last,
    )
    assert sizes is not None, last
    least, whole = map(parse_size, sizes.groups())
    asked = {"context": 9, "page_size": PAGE}
    assert 0 < least < whole < BUDGET
    assert ballonet.plan(saved, **asked, budget=least)["layers_streamed"] > 0
    assert ballonet.plan(saved, **asked, budget=whole)["layers_streamed"] == 0
    assert not ballonet.plan(saved, **asked, budget=least - PAGE)["fits"]
    assert "does not fit into the budget of 4KiB. It needs " in planner.outlook(saved, 9, PAGE, PAGE)
    assert planner.outlook("nowhere", 9, BUDGET, PAGE).startswith("Whether it fits is not known")


def test_sizes_that_were_left_out_are_one_line_for_each_reason(
    saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {(1, 16): "too long", (2, 8): "too long", (2, 1024): "no room"}
    record_ = Record({"size": "1", "device": "d", "link": "l"}, 1e9, {Point("decode", 1, 8): 0.1})
    known = profile.Profile(record_, Path("nowhere"), False, left)
    monkeypatch.setattr(profile_facts, "load_or_measure", lambda *_, **__: known)
    assert main(["profile", saved]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "measured:" in line]
    assert shown == [
        "Not measured: 2 sizes, 1 x 16 and more tokens (too long).",
        "Not measured: 2 x 1,024 tokens (no room).",
    ]
    assert main(["profile", saved, "--verbose"]) == 0
    assert "Not measured: 1 x 16, 2 x 8 tokens (too long)." in capsys.readouterr().out


@pytest.mark.parametrize(("ratio", "hidden"), [(1.02, 1), (1.04, 2), (4.4, 5)])
def test_smallest_hidden_interval_follows_the_ratio(
    saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ratio: float, hidden: int
) -> None:
    """Four layers are copied in `ratio` times what they compute in; 3 % are not seen."""

    def known(model: Any, *_: Any, **__: Any) -> profile.Profile:
        seconds = 4 * 0.01
        bandwidth = PAGE * max(profile_facts.layer_pages(model, PAGE)) / (0.01 * ratio)
        return profile.Profile(Record({}, bandwidth, {Point("decode", 1, 8): seconds}), Path("nowhere"), True, {})

    monkeypatch.setattr(profile_facts, "load_or_measure", known)
    assert main(["profile", saved, "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["ratio"] == pytest.approx(ratio)
    assert point["hidden"] == hidden


def test_where_layers_stream(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the smallest budget that does."""
    ballonet.set_budget(16 * PAGE)
    try:
        with pytest.raises(BudgetError) as refused:
            ballonet.from_pretrained(saved)
        ballonet.set_budget(refused.value.smallest)
        assert main(["profile", saved, "--batch", "1", "--length", "8", "--json"]) == 0
    finally:
        ballonet.set_budget(BUDGET)
    facts = json.loads(capsys.readouterr().out)
    assert facts["streamed"]
    assert len(facts["points"]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--tpot-slo", "0"], "no time"), (["--ttft-slo", "soon"], "is no time"), (["--batch", "0"], "less than 1")],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "somewhere", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_folder_that_is_no_model_is_refused(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path)]) == 2
    assert "is no model that can be loaded" in capsys.readouterr().err
