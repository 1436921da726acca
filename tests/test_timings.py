"""The times of a model that decodes by pieces of CUDA graphs and eagerly, and what the manager makes of them."""

from __future__ import annotations

from ballonet.hooks.measure.pace import Measured
from ballonet.hooks.measure.timings import Timings
from ballonet.offload.policy.plan import Costs, Plan, at_interval, meeting
from ballonet.offload.record.record import Point, Record

from .fake_manager import EQUAL, LINK, a_manager

HERE = Point("decode", 1, 100)
EAGER, PIECES = 0.022, 0.007


def timed(seconds: float, pieces: bool, point: Point = HERE) -> Measured:
    return Measured(point, seconds, 0.0, seconds, pieces=pieces)


def after(*steps: tuple[float, bool], record: Record | None = None) -> Timings:
    """The times of a model that has made these decode steps: (seconds, by pieces?)."""
    timings = Timings(lambda: float(LINK))
    timings.record = record
    for seconds, pieces in steps:
        timings.note(timed(seconds, pieces))
    timings.learn()
    return timings


def test_steps_by_pieces_replace_the_longer_eager_ones() -> None:
    timings = after(*[(EAGER, False)] * 20)
    assert (timings.seconds(HERE), timings.typical(HERE)) == (EAGER, EAGER)
    assert timings.note(timed(PIECES, True)), "the manager is told at once"
    assert (timings.seconds(HERE), timings.typical(HERE)) == (PIECES, PIECES)
    assert timings.last["decode"].pieces


def test_eager_steps_again_count_by_the_eager_times() -> None:
    """A loop of batches, or pieces that were refused."""
    timings = after(*[(EAGER, False)] * 3, *[(PIECES, True)] * 20)
    assert timings.note(timed(EAGER, False))
    assert (timings.seconds(HERE), timings.typical(HERE)) == (EAGER, EAGER)
    assert timings.note(timed(PIECES, True))
    assert timings.seconds(HERE) == PIECES


def test_sizes_without_a_time_by_pieces_count_as_eager() -> None:
    longer = Point("decode", 1, 5000)
    timings = after((EAGER, False), (PIECES, True))
    timings.note(timed(EAGER, False, longer))
    timings.note(timed(PIECES, True))
    assert timings.seconds(longer) == EAGER
    assert timings.seconds(Point("decode", 1, 9)) == PIECES, "less work takes no longer"


def test_prefills_and_checks_of_assisted_decoding_are_no_decode_steps() -> None:
    timings = after((PIECES, True))
    timings.note(timed(0.03, False, Point("prefill", 1, 64)))
    timings.note(timed(0.008, True, Point("prefill", 1, 21)))
    timings.learn()
    assert timings.record is not None
    assert {point.phase for point in timings.record.points} == {"prefill", "pieces"}
    assert timings.seconds(HERE) == PIECES


def test_a_measured_record_counts_by_pieces_before_the_first_step() -> None:
    record = Record({}, LINK, {Point("decode", 1, 128): EAGER, Point("pieces", 1, 128): PIECES})
    assert record.decoding == "pieces"
    assert after(record=record).seconds(HERE) == PIECES
    assert after((EAGER, False), record=record).seconds(HERE) == EAGER
    assert Record({}, LINK, {Point("decode", 1, 128): EAGER}).decoding == "decode"


def test_the_manager_judges_an_slo_by_the_time_of_a_step_by_pieces() -> None:
    _device, manager, _, (a,) = a_manager(60, {"tpot": 0.02})
    timings = after(*[(EAGER, False)] * 20)
    a.seconds, a.typical = timings.seconds, timings.typical  # type: ignore[method-assign]
    eager = a.step(manager, batch=1, length=100)
    assert eager.refusal is not None, "computing alone takes longer"
    assert timings.note(timed(PIECES, True))
    manager.changed(a)
    pieces = a.step(manager, batch=1, length=100)
    costs = Costs(EQUAL, PIECES, 0.001)
    assert pieces.refusal is None
    assert pieces.plan == at_interval(EQUAL, meeting(costs, 0.02) or 0)
    assert costs.of(pieces.plan) <= 0.02


def test_time_of_a_step_that_streams_counts_without_the_host_time_of_its_layers() -> None:
    """What the host took for each of them is added to what a plan takes, and would count twice."""
    timings = Timings(lambda: float(LINK))
    timings.record = Record({}, float(LINK), entering=0.001)
    timings.note(timed(EAGER, False), at_interval(EQUAL, 2))
    timings.learn()
    assert timings.seconds(HERE) == EAGER - 4 * 0.001
    assert timings.entering == 0.001
    timings.note(timed(EAGER, False, Point("decode", 1, 1000)), Plan(EQUAL))
    timings.learn()
    assert timings.seconds(Point("decode", 1, 1000)) == EAGER
