"""How much queued prompts need, how much fits into a group, where a request goes, what is pulled to restore; and when
replicas are overloaded, calm or dead.
"""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.replicas.cluster import Heartbeat
from ballonet.offload.policy.replicas.demand import (
    Calm,
    Growth,
    KVSize,
    Usage,
    group_tokens,
    is_overloaded,
    kv_pages,
    needed_pages,
    prompt_pages,
)
from ballonet.offload.policy.replicas.drops import Pull, group_restore, homes, pull_order, restore_plan
from ballonet.offload.policy.replicas.groups import Group, Span, alone
from ballonet.offload.policy.replicas.requests import Dispatcher
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

KV = KVSize(token=128, page=1024)  # 8 tokens a page
SIZE = st.integers(1, 40)
PAIR = Group((1, 2), (Span(0, 2), Span(2, 4)))


def test_prompts_need_whole_pages_and_one_token_more() -> None:
    assert [KV.pages(tokens) for tokens in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert prompt_pages([7, 8, 100], KV) == 1 + 2 + 13


def test_free_pages_count_against_the_demand() -> None:
    assert (needed_pages(50, 20), needed_pages(20, 20), needed_pages(10, 20)) == (30, 0, 0)


@pytest.mark.parametrize(("token", "page"), [(0, 1), (1, 0)])
def test_sizes_are_at_least_a_byte(token: int, page: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        KVSize(token, page)


def test_pair_has_room_for_the_tokens_of_the_model_that_is_gone() -> None:
    """Qwen2.5-14B: 28 GB of 80 GB, 192 KiB a token (paper 003, Table 1 and §2.2), here in pages of 2 MB and layers
    that are many, so that a slot is small."""
    layers, page, token = 1000, 2 * 10**6, 192 * 2**10
    pages, memory = [28 * 10**9 // page // layers] * layers, 80 * 10**9 // page
    merged = Group((1, 2), (Span(0, layers // 2), Span(layers // 2, layers)))
    tokens = [
        group_tokens(group, kv_pages(group, {1: memory, 2: memory}, pages), KVSize(token, page))
        for group in (alone(1, layers), merged)
    ]
    assert 2 * tokens[0] == pytest.approx(528971, abs=2)
    assert tokens[1] == pytest.approx(671386, rel=1e-3)


def test_a_member_has_for_kv_what_its_span_and_its_slot_leave() -> None:
    group = Group((1, 2), (Span(0, 3), Span(3, 4)))
    assert kv_pages(group, {1: 100, 2: 100}, [10, 20, 5, 7]) == {1: 100 - 35 - 7, 2: 100 - 7 - 20}
    assert kv_pages(alone(1, 4), {1: 100}, [10, 20, 5, 7]) == {1: 58}
    assert kv_pages(alone(1, 4), {1: 40}, [10, 20, 5, 7]) == {1: 0}


def test_the_member_with_most_layers_for_its_room_counts() -> None:
    group = Group((1, 2), (Span(0, 3), Span(3, 4)))
    assert group_tokens(group, {1: 30, 2: 30}, KV) == 30 * 8 * 4 // 3
    assert group_tokens(group, {1: 30, 2: 5}, KV) == 5 * 8 * 4
    assert group_tokens(alone(1, 4), {1: 30}, KV) == 240


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 500))
def test_k_equal_members_hold_k_times_as_many_tokens_in_their_room(k: int, size: int, room: int) -> None:
    spans = tuple(Span(size * stage, size * (stage + 1)) for stage in range(k))
    group = Group(tuple(range(k)), spans)
    assert group_tokens(group, dict.fromkeys(range(k), room), KV) == k * room * 8


def test_a_request_goes_where_most_room_is_left_for_each_replica() -> None:
    dispatcher = Dispatcher()
    dispatcher.add((1,), 100)
    dispatcher.add((2, 3), 300)
    # after 10 tokens: 90 of one replica; 290 of two, 145 of each
    assert dispatcher.choose(10) == (2, 3)
    dispatcher.promise((2, 3), 110)  # 190 - 10 = 180, 90 of each: as much, so the smaller group
    assert dispatcher.choose(10) == (1,)
    dispatcher.release((2, 3), 2)
    assert dispatcher.choose(10) == (2, 3)
    assert dispatcher.choose(101) == (2, 3)  # the other could never hold it
    assert dispatcher.choose(301) is None
    dispatcher.remove((2, 3))
    assert dispatcher.choose(10) == (1,)
    assert dispatcher.choose(101) is None


def test_requests_of_one_moment_are_spread_by_their_demand() -> None:
    """Not in turn: two long ones fill a group each, and the short ones go to the third."""
    dispatcher = Dispatcher()
    for number in range(3):
        dispatcher.add((number,), 1000)
    chosen = []
    for demand in (900, 900, 100, 100, 100, 100):
        group = dispatcher.choose(demand)
        assert group is not None
        dispatcher.promise(group, demand)
        chosen.append(group)
    assert {chosen[0], chosen[1], chosen[2]} == {(0,), (1,), (2,)}
    assert {*chosen[2:]} == {chosen[2]}


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take", "give", "choose"]), st.integers(0, 5), SIZE)))
def test_the_heaps_choose_as_a_look_at_all_groups_does(steps: list[tuple[str, int, int]]) -> None:
    dispatcher, rooms = Dispatcher(), dict[tuple[int, ...], list[int]]()
    for what, number, size in steps:
        group = tuple(range(10 * number, 10 * number + 1 + number % 3))
        if what == "add" and group not in rooms:
            dispatcher.add(group, 10 * size)
            rooms[group] = [10 * size, 10 * size]
        elif what == "remove" and group in rooms:
            dispatcher.remove(group)
            del rooms[group]
        elif what in ("take", "give") and group in rooms:
            change = size if what == "take" else -size
            dispatcher.promise(group, change)
            rooms[group][1] -= change
        chosen = dispatcher.choose(size)
        left = {members: (room - size) / len(members) for members, (most, room) in rooms.items() if most >= size}
        assert (chosen is None) == (not left)
        if chosen is not None:
            assert left[chosen] == max(left.values())
        assert len(dispatcher) == len(rooms)


def test_a_choice_among_n_groups_takes_log_n_steps() -> None:
    """Calls of functions, of Python and of C, while a thousand requests are placed."""
    counts = {}
    for groups in (64, 512, 4096):
        dispatcher = Dispatcher()
        for number in range(groups):
            dispatcher.add((number,), 10**6)
        counts[groups] = calls(dispatcher)
    assert max(counts.values()) <= 1.5 * min(counts.values()), counts


def calls(dispatcher: Dispatcher) -> int:
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        for number in range(1000):
            group = dispatcher.choose(10 + number % 7)
            assert group is not None
            dispatcher.promise(group, 10 + number % 7)
    finally:
        sys.setprofile(None)
    return count


def test_the_layer_that_is_needed_next_is_pulled_first() -> None:
    assert pull_order(Span(2, 4), 6) == (4, 5, 0, 1)
    assert pull_order(Span(0, 6), 6) == ()
    assert group_restore(PAIR) == {
        1: (Pull(1, 2, 2), Pull(1, 3, 2)),
        2: (Pull(2, 0, 1), Pull(2, 1, 1)),
    }


@given(st.integers(2, 6), st.integers(1, 8))
def test_each_of_k_equal_members_pulls_k_less_one_of_k_parts(k: int, size: int) -> None:
    spans = tuple(Span(size * stage, size * (stage + 1)) for stage in range(k))
    group = Group(tuple(range(k)), spans)
    plans = group_restore(group)
    for member, pulls in plans.items():
        assert len(pulls) * k == group.layers * (k - 1)
        assert sorted([*(pull.layer for pull in pulls), *group.span(member).layers]) == list(range(group.layers))
        assert all(pull.source == group.holder(pull.layer) != member for pull in pulls)


def test_peers_are_asked_in_order_and_then_the_backing() -> None:
    plan = restore_plan(9, Span(0, 1), 4, [Group((9, 1), (Span(0, 3), Span(3, 4))), PAIR])
    assert plan == (Pull(9, 1, 1), Pull(9, 2, 2), Pull(9, 3, 1))
    assert restore_plan(9, Span(0, 1), 3, []) == (Pull(9, 1, None), Pull(9, 2, None))


def test_requests_find_a_home_largest_first() -> None:
    assert homes({"a": 10, "b": 60, "c": 50}, {1: 70, 2: 60}) == {"b": 1, "c": 2, "a": 1}
    assert homes({"a": 71}, {1: 70, 2: 60}) is None
    assert homes({}, {1: 0}) == {}


# Overload, calm and death


TUNING = ReplicaTuning(full=0.95, calm=0.5, dwell=10.0, looks=8, silent=1.0, iterations=5, remembered=3)


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
    return [calm.observe(start + at, Usage(pages, 100 - pages, pending, 100)) for at, pages in enumerate(used)]


def test_calm_takes_the_whole_dwell() -> None:
    assert looks(Calm(TUNING), [20] * 12) == [False] * 10 + [True, True]


@pytest.mark.parametrize("used", [0, 20, 49])
def test_flat_load_is_calm_as_that_of_idle_replicas_cannot_fall(used: int) -> None:
    calm = Calm(TUNING)
    assert looks(calm, [used] * 60) == [False] * 10 + [True] * 50
    assert looks(calm, [used + 1] * 2, start=60.0) == [False, False], "it rises"


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


def test_samples_that_are_forgotten_count_no_more() -> None:
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
    growth = Growth(ReplicaTuning(looks=3, ahead=10.0))
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
