"""SLOs at run time: what was measured is looked up, what cannot be kept is refused, what can decides what streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.config import cache_dir
from ballonet.allocator.errors import SLOError
from ballonet.hooks.device import managers
from ballonet.hooks.device.key import key_of
from ballonet.offload.record import record
from ballonet.offload.record.record import Point, Record

from ..models import Output
from ..tuned import Tuned
from .conftest import full, say

pytestmark = pytest.mark.chaos


LAYER = 8 * 4096  # bytes of one that streams


def measured(model: Any, *, prefill: float, decode: float, bandwidth: float) -> Path:
    """As `ballonet profile` would have left it: seconds of an iteration, bytes per second."""
    seconds = {}
    for batch in (1, 2, 4, 8):
        for length in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            seconds[Point("prefill", batch, length)] = prefill
            seconds[Point("decode", batch, length)] = decode
    key = key_of(model, devices.require())
    path = record.path_of(cache_dir(devices.of().settings), key)
    record.save(Record(key, bandwidth, seconds), path)
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = managers.of(devices.require())
    monkeypatch.setattr("ballonet.hooks.profile.cache_dir", lambda settings: tmp_path)
    monkeypatch.setattr(f"{__name__}.cache_dir", lambda settings: tmp_path)
    manager.link.bandwidth = 1e12


def test_as_many_layers_stream_as_the_slo_allows(model: Any, stock: Output) -> None:
    """A layer computes in 1 s and is copied in 3.5 s: by the formulas 4.5 s do for one, 7 for two, 14 for all."""
    for slo, count in ((4.1, 0), (4.6, 1), (7.1, 2), (14.5, 4)):
        measured(model, prefill=4.0, decode=4.0, bandwidth=LAYER / 3.5)
        with ballonet.manage(model, tpot_slo=slo, ttft_slo=slo) as managed:
            assert say(model).agrees(stock)
            assert len(managed.report().streamed) == count, slo
            report = managed.report()
            assert report.bandwidth == LAYER / 3.5
            assert report.times["decode"].slo == slo
            assert (report.link_bytes > 0) == (count > 0)
            assert str(report)


@pytest.mark.parametrize(("tpot", "count"), [(4.1, 0), (4.6, 1)])
def test_prefill_and_decode_in_turn_load_nothing_at_their_boundaries(
    model: Any, stock: Output, tpot: float, count: int
) -> None:
    """A prefill is long enough to hide every layer, and decoding is not: what streams in the one would come over the
    link for the other."""
    measured(model, prefill=40.0, decode=4.0, bandwidth=LAYER / 3.5)
    seen: list[tuple[int, ...]] = []
    with ballonet.manage(model, tpot_slo=tpot, ttft_slo=41.0) as managed:
        handle = model.model.layers[-1].register_forward_hook(lambda *_: seen.append(managed.report().streamed))
        assert say(model).agrees(stock)
        before, forwards = managed.report().link_bytes, len(seen)
        assert say(model).agrees(stock)
        handle.remove()
        moved = managed.report().link_bytes - before
    assert len(set(seen)) == 1, "one plan"
    assert len(seen[0]) == count
    assert moved <= count * LAYER * (len(seen) - forwards + 1), "what streams, and nothing else"


@pytest.mark.parametrize("slo", [3.9, "1ms"])
def test_an_slo_below_the_resident_time_is_refused(model: Any, original: Any, slo: Any) -> None:
    measured(model, prefill=4.0, decode=4.0, bandwidth=1e9)
    with pytest.raises(SLOError, match="an SLO of 4000 ms") as caught:
        ballonet.manage(model, tpot_slo=slo)
    assert caught.value.slo == pytest.approx(4.0)
    devices.require().check()
    with ballonet.manage(model, tpot_slo=caught.value.slo):
        pass


def test_an_slo_of_a_model_whose_layers_are_too_small_to_stream(model: Any, tuned: Tuned) -> None:
    tuned(weights={"large": 2**30})
    measured(model, prefill=4.0, decode=4.0, bandwidth=1e9)
    with pytest.raises(SLOError) as caught:
        ballonet.manage(model, tpot_slo=3.9)
    assert caught.value.slo == pytest.approx(4.0)
    with ballonet.manage(model, tpot_slo=caught.value.slo, ttft_slo=5.0) as managed:
        say(model)
        assert managed.report().streamed == ()


def test_an_slo_that_the_link_does_not_allow_any_more_is_said_once(model: Any, stock: Output) -> None:
    measured(model, prefill=4.0, decode=4.0, bandwidth=1e9)
    with full(but=90), ballonet.manage(model, tpot_slo=5.0) as managed, full(but=40):
        assert say(model).agrees(stock)
        assert managed.report().streamed
        managers.of(devices.require()).link.bandwidth = LAYER / 100
        with pytest.warns(RuntimeWarning, match="a decode step within 5000 ms is not kept") as warned:
            assert all(say(model).agrees(stock) for _ in range(2))
        assert len(warned) == 1
        assert "is not kept" in managed.report().why
