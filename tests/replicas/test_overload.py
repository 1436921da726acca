"""When replicas are overloaded, when they are calm, and when one is dead."""

from __future__ import annotations

import pytest

from ballonet.offload.policy.replicas.cluster import Heartbeat
from ballonet.offload.policy.replicas.demand import Calm, Growth, Usage, is_overloaded
from ballonet.offload.policy.tuning import Replicas

TUNING = Replicas(full=0.95, calm=0.5, dwell=10.0, looks=8, silent=1.0, iterations=5, remembered=3)


@pytest.mark.parametrize(
    ("used", "free", "pending", "expected"),
    [
        (95, 5, 5, True),
        (94, 6, 6, False),  # not full
        (95, 5, 4, False),  # what waits finds room
        (100, 0, 1, True),
        (100, 0, 0, False),  # full, and nobody waits
    ],
)
def test_overload_is_full_memory_and_no_less_pending_than_free(
    used: int, free: int, pending: int, expected: bool
) -> None:
    assert is_overloaded(Usage(used, free, pending, 100), TUNING) is expected


def looks(calm: Calm, used: list[int], pending: int = 0, start: float = 0.0) -> list[bool]:
    return [calm.observe(start + at, Usage(each, 100 - each, pending, 100)) for at, each in enumerate(used)]


def test_calm_takes_the_whole_dwell() -> None:
    assert looks(Calm(TUNING), [20] * 12) == [False] * 10 + [True, True]


def test_half_of_the_undropped_memory_is_not_calm() -> None:
    """Undropped, not what is there now."""
    calm = Calm(TUNING)
    assert not any(calm.observe(at, Usage(50, 150, 0, 100)) for at in range(30))
    assert any(calm.observe(at, Usage(49, 151, 0, 100)) for at in range(30, 60))


def test_one_look_with_something_pending_starts_the_dwell_anew() -> None:
    calm = Calm(TUNING)
    looks(calm, [20] * 9)
    assert looks(calm, [20], pending=1, start=9.0) == [False]
    assert looks(calm, [20] * 11, start=10.0) == [False] * 10 + [True]


def test_a_load_that_rises_is_not_calm_until_it_stops() -> None:
    calm = Calm(TUNING)
    assert not any(looks(calm, list(range(10, 40))))
    assert looks(calm, [40] * 8, start=30.0)[-1]


def test_what_is_forgotten_counts_no_more() -> None:
    calm = Calm(TUNING)
    looks(calm, [20] * 11)
    calm.forget()
    assert looks(calm, [20] * 2, start=11.0) == [False, False]


def test_a_count_that_stands_still_for_a_second_is_dead() -> None:
    heart = Heartbeat(0.0, TUNING)
    for beat in range(10):
        heart.beat(beat / 10, beat)
    assert not heart.is_dead(1.9)
    heart.beat(1.8, 9)  # it speaks, and its count does not move
    assert heart.is_dead(1.91)


def test_slow_iterations_are_given_five_times_their_length() -> None:
    heart = Heartbeat(0.0, TUNING)
    for at, beat in ((0.0, 0), (3.0, 1), (3.1, 2), (3.2, 3)):
        heart.beat(at, beat)
    assert heart.patience == 15.0
    assert not heart.is_dead(18.2)
    assert heart.is_dead(18.3)
    heart.beat(3.3, 4)  # the long one is forgotten
    assert heart.patience == 1.0


def test_the_first_full_batch_is_given_five_times_what_it_is_predicted_to_take() -> None:
    heart = Heartbeat(0.0, TUNING, full=3.0)
    for beat in range(10):  # of a main loop with nothing to do
        heart.beat(beat / 10, beat)
    assert not heart.is_dead(15.8)
    assert heart.is_dead(16.0)
    for at, beat in ((4.9, 10), (5.0, 11)):  # one took longer
        heart.beat(at, beat)
    assert heart.patience == 20.0


def test_several_iterations_between_two_beats_share_the_time() -> None:
    heart = Heartbeat(0.0, TUNING)
    heart.beat(0.0, 0)
    heart.beat(4.0, 8)
    assert heart.patience == 2.5


def test_time_in_which_nobody_listened_is_excused() -> None:
    heart = Heartbeat(0.0, TUNING)
    heart.discount(5.0)
    assert not heart.is_dead(6.0)
    assert heart.is_dead(6.1)


def test_growth_is_looked_ahead_at_the_rate_of_late() -> None:
    growth = Growth(Replicas(looks=3, ahead=10.0))
    assert growth.pages == 0
    growth.observe(0.0, Usage(0, 100, 0, 100))
    assert growth.pages == 0
    growth.observe(1.0, Usage(8, 92, 2, 100))
    assert growth.pages == 100
    growth.observe(2.0, Usage(10, 90, 0, 100))
    growth.observe(3.0, Usage(11, 89, 1, 100))  # the first is forgotten: 2 in 2 s
    assert growth.pages == 10
    growth.observe(4.0, Usage(1, 99, 0, 100))
    assert growth.pages == 0
