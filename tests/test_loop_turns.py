"""Models that share a device or take turns on it: the price of either plan, whose turn it is, and what loops do."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.manager.turns import LoopTurns, LoopWork, Seat
from ballonet.offload.policy.plan import fewest
from ballonet.offload.policy.turns import (
    SHARED,
    DeviceTurn,
    Room,
    TurnWork,
    Waiter,
    cheaper_in_turns,
    lost_in_turns,
    lost_shared,
    moved,
    next_turn,
    queued,
    waits,
)

from .fake_manager import EQUAL, LINK, PAGE, FakeCache, FakeModel, a_manager
from .tuned import Clock

PATIENCE, BOUND, MARGIN = 20.0, 3.0, 0.05
MODEL = TurnWork(seconds=9.2e-3, weights=32 * 52, slot=52, kv=200)  # of 8B, in pages of 8 MiB
ROOM = Room(2500, 8 * 2**20 / 55e9)  # 24 GiB, without embeddings and heads of two such
FAST = replace(ROOM, page_seconds=8 * 2**20 / 450e9)


def in_turns(works: list[TurnWork], room: Room, now: bool = False) -> bool:
    return cheaper_in_turns(works, room, PATIENCE, BOUND, MARGIN, now)


def test_two_models_that_lack_a_third_of_their_pages_take_turns() -> None:
    """1,228 pages are short, and a pass hides copies of 8 each: a round of 18 ms waits for 185 ms. In turns of 3 s 187
    ms go into moving."""
    assert waits([MODEL, MODEL], ROOM) == pytest.approx(0.185, abs=1e-3)
    assert moved([MODEL, MODEL], ROOM) == pytest.approx(0.187, abs=1e-3)
    assert lost_shared([MODEL, MODEL], ROOM) == pytest.approx(0.91, abs=0.01)
    assert lost_in_turns([MODEL, MODEL], ROOM, PATIENCE, BOUND) == pytest.approx(0.062, abs=1e-3)
    assert in_turns([MODEL, MODEL], ROOM)


def test_models_share_where_all_fit_or_copies_hide() -> None:
    assert not in_turns([MODEL, MODEL], replace(ROOM, pages=2 * MODEL.pages))
    assert not in_turns([MODEL, MODEL], replace(FAST, pages=2 * MODEL.pages - 800)), "each pass hides 441 pages"
    assert in_turns([MODEL, MODEL], replace(ROOM, pages=2 * MODEL.pages - 800))
    assert not in_turns([MODEL], ROOM), "alone it has the device in any case"


def test_passes_of_prompts_hide_more_so_that_models_with_long_prompts_share() -> None:
    """A prompt of 2,048 tokens takes 80 ms, in which 4,300 pages cross a fast link; a token's 9 ms hide 440."""
    room, prompts = replace(FAST, pages=2 * MODEL.pages - 1100), replace(MODEL, prompting=0.08, prompts=0.5)
    assert in_turns([MODEL, MODEL], room)
    assert not in_turns([prompts, prompts], room)
    assert waits([prompts, prompts], room) == pytest.approx(waits([MODEL, MODEL], room) / 2)
    assert in_turns([prompts, prompts], replace(ROOM, pages=room.pages)), "a slow link hides little of either"


def test_models_share_while_requests_may_wait_for_others_to_end_and_few_have_to() -> None:
    """There is room for all weights and three quarters of the KV, and a pass hides 8 pages: a quarter more passes of 9
    ms, in a round of 89."""
    room = replace(ROOM, pages=2 * MODEL.weights + 300)
    known = replace(MODEL, prompting=0.08, prompts=0.5, fixed=9e-3)
    assert queued([known, known], room) == pytest.approx(0.0047, abs=1e-4)
    assert lost_shared([known, known], room) == pytest.approx(0.05, abs=0.01)
    assert in_turns([MODEL, MODEL], room), "what a step takes whatever is in it is not known"
    assert not in_turns([known, known], room)
    many = replace(known, kv=2000)
    assert in_turns([many, many], room), "most of them would have to wait"
    assert queued([known, known], ROOM) == math.inf, "weights alone are more than there is room for"


def test_strict_slos_and_a_bound_of_nothing_have_models_share() -> None:
    hurried = replace(MODEL, slack=0.1)
    assert lost_in_turns([MODEL, hurried], ROOM, PATIENCE, BOUND) == 1, "a turn lasts as long as what moves"
    assert not in_turns([MODEL, hurried], ROOM)
    assert not cheaper_in_turns([MODEL, MODEL], ROOM, PATIENCE, 0.0, MARGIN, False)


def test_the_present_plan_stays_where_the_other_saves_little() -> None:
    def saved(pages: int) -> float:
        works, room = [MODEL, MODEL], replace(ROOM, pages=pages)
        return lost_shared(works, room) - lost_in_turns(works, room, PATIENCE, BOUND)

    pages = next(pages for pages in range(2 * MODEL.pages, 0, -1) if 0 < saved(pages) < MARGIN)
    assert not in_turns([MODEL, MODEL], replace(ROOM, pages=pages), now=False)
    assert in_turns([MODEL, MODEL], replace(ROOM, pages=pages), now=True)


def test_a_floor_of_another_is_no_room_in_a_turn() -> None:
    kept = replace(MODEL, floor=1500)
    assert lost_in_turns([MODEL, kept], ROOM, PATIENCE, BOUND) > 0.5
    assert lost_in_turns([MODEL, replace(MODEL, floor=500)], ROOM, PATIENCE, BOUND) < 0.1


SIZES = st.builds(
    TurnWork,
    seconds=st.integers(0, 8).map(float),
    weights=st.integers(3, 6),
    slot=st.integers(1, 3),
    kv=st.integers(0, 3),
)


@given(st.lists(SIZES, min_size=1, max_size=2), st.integers(0, 18))
def test_pass_waits_for_the_least_of_all_ways_to_go_without(works: list[TurnWork], pages: int) -> None:
    """Brute force: each model frees so many pages of its layers, which stream through a slot and hide behind its pass,
    and what is still short is read in place. A page takes a second."""
    short = sum(work.pages for work in works) - pages
    ways = [0.0] if short <= 0 else []
    freed = [range(work.weights - work.slot + 1) for work in works]
    for first in freed[0]:
        for second in freed[1] if len(works) > 1 else [0]:
            gone = [first, second][: len(works)]
            if short > 0 and sum(gone) <= short:
                streams = (
                    max(0.0, count + work.slot - work.seconds) if count else 0.0
                    for count, work in zip(gone, works, strict=True)
                )
                ways.append(sum(streams) + short - sum(gone))
    assert waits(works, Room(pages, 1.0)) == pytest.approx(min(ways))


def test_a_turn_goes_on_while_nobody_waits_and_ends_when_its_work_does() -> None:
    mine = Waiter(1, True, 0.0)
    assert next_turn(50.0, DeviceTurn(1, 0.0), [mine], 0.1, PATIENCE, BOUND) == DeviceTurn(1, 0.0)
    other = Waiter(2, False, 0.5)
    assert next_turn(1.0, DeviceTurn(1, 0.0), [other], 0.1, PATIENCE, BOUND) == DeviceTurn(2, 1.0)
    assert next_turn(1.0, DeviceTurn(), [other, mine], 0.1, PATIENCE, BOUND) == DeviceTurn(1, 1.0), "who runs is there"


def test_loop_that_waits_long_has_the_other_end_what_runs_and_then_suspends_it() -> None:
    works = [Waiter(1, True, 0.0, waits=1), Waiter(2, False, 1.0, waits=1)]

    def at(now: float, *, runs: bool = True) -> DeviceTurn:
        waiters = [replace(works[0], runs=runs), works[1]]
        return next_turn(now, DeviceTurn(1, 0.0), waiters, 0.1, PATIENCE, BOUND)

    assert at(2.9) == DeviceTurn(1, 0.0)
    assert at(3.1) == DeviceTurn(1, 0.0, next=2, ends=3.1)
    assert at(3.1, runs=False) == DeviceTurn(2, 3.1)
    assert at(4.1) == DeviceTurn(2, 4.1)


def test_a_turn_ends_once_none_of_its_requests_waits_but_not_before_what_moved_has_paid() -> None:
    begun, ends = DeviceTurn(1, 0.0), DeviceTurn(1, 0.0, next=2, ends=0.41)

    def at(now: float, turn: DeviceTurn, waits: int = 0) -> DeviceTurn:
        waiters = [Waiter(1, 1, 0.0, waits=waits), Waiter(2, 0, 0.0, waits=1)]
        return next_turn(now, turn, waiters, 0.1, PATIENCE, BOUND)

    assert at(0.39, begun) == at(0.41, begun, waits=1) == begun
    assert at(0.41, begun) == ends
    assert at(0.5, ends, waits=1) == ends, "another came meanwhile, and waits"


def test_the_last_few_are_suspended_where_many_wait_for_long_answers() -> None:
    ends = DeviceTurn(1, 0.0, next=2, ends=1.0)

    def has(runs: int, waits: int, answer: float) -> int:
        waiters = [Waiter(1, runs, 0.0, answer=answer), Waiter(2, 0, 0.5, waits=waits)]
        return next_turn(1.1, ends, waiters, 0.1, PATIENCE, BOUND).has

    assert has(3, 13, 0.8) == 2
    assert has(4, 13, 0.8) == 1, "four for each have to wait"
    assert has(3, 13, 0.12) == 1, "they end soon"


def test_the_next_model_begins_while_the_last_answers_end_and_has_the_turn_after_them() -> None:
    ends = DeviceTurn(1, 0.0, next=2, ends=3.1)
    first, second, third = Waiter(1, True, 0.0), Waiter(2, True, 3.2), Waiter(3, False, 3.0)

    def at(now: float, *waiters: Waiter) -> DeviceTurn:
        return next_turn(now, ends, waiters, 0.1, PATIENCE, BOUND, beside=(2,))

    assert at(3.5, first, second) == at(3.5, first, second, third) == ends, "both compute"
    assert at(3.5, replace(first, runs=False), second) == DeviceTurn(2, 3.5), "though it has requests that wait"
    assert at(3.5, second, third) == DeviceTurn(2, 3.5), "though another waits for longer"
    assert at(3.2 + BOUND, first, second) == DeviceTurn(2, 3.2 + BOUND), "for what waits behind long answers"
    assert at(3.0 + BOUND, first, second, third).has == 3, "it waited for the bound"
    assert at(3.5, first) == DeviceTurn(1, 0.0), "the next one has no work any more: the turn goes on"


def test_an_slo_ends_a_turn_but_not_before_what_moved_has_paid() -> None:
    works = [Waiter(1, True, 0.0), Waiter(2, False, 1.0), Waiter(3, False, 1.1, due=1.5)]
    assert next_turn(1.4, DeviceTurn(1, 0.0), works, 0.1, PATIENCE, BOUND).has == 1
    assert next_turn(1.6, DeviceTurn(1, 0.0), works, 0.1, PATIENCE, BOUND).has == 3
    assert next_turn(1.6, DeviceTurn(1, 1.55), works, 0.1, PATIENCE, BOUND).has == 1


@given(
    models=st.integers(2, 4),
    moves=st.floats(0.01, 0.5),
    bound=st.floats(0.0, 4.0),
    hurried=st.sets(st.integers(1, 4)),
    steps=st.lists(st.floats(0.005, 0.3), min_size=20, max_size=60),
    runs=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_nobody_waits_for_longer_than_the_bound_whatever_others_have_to_do(
    models: int, moves: float, bound: float, hurried: set[int], steps: list[float], runs: list[bool]
) -> None:
    """All have work all the time, answers never end, and some have SLOs that are missed already."""
    now, turn, since = 0.0, DeviceTurn(), dict.fromkeys(range(1, models + 1), 0.0)
    longest, turns = 0.0, 0
    for step in steps * 6:
        waiters = [Waiter(n, runs[n - 1], since[n], 0.0 if n in hurried else math.inf) for n in since]
        before, turn = turn, next_turn(now, turn, waiters, moves, PATIENCE, bound)
        if turn.has != before.has:
            assert before.has == SHARED or now - before.began >= moves or not runs[before.has - 1]
            turns += 1
            since[before.has if before.has in since else turn.has] = now
            now += moves
        now += step
        longest = max([longest, *(now - came for number, came in since.items() if number != turn.has)])
    assert longest <= bound + models * (moves + max(moves, max(steps)))
    assert turns > 1 or now < bound + moves


# Loops


class Loop:
    """A loop of a made-up model, with what it has to do."""

    def __init__(self, turns: LoopTurns, model: FakeModel) -> None:
        self.turns, self.model = turns, model
        self.woken = 0
        known = weakref.ref(self)
        self.seat: Seat = turns.seat(self, lambda: model, lambda: None if (it := known()) is None else it.wake())
        turns.join(self.seat)

    def wake(self) -> None:
        self.woken += 1

    def asks(
        self,
        kv: int = 20,
        *,
        runs: bool | None = None,
        since: float | None = None,
        due: float = math.inf,
        begun: int = 0,
    ) -> bool:
        """Returns whether it may compute. `runs`: whether a request has begun, as a rule if none waits."""
        run = since is None if runs is None else runs
        work = LoopWork(kv * PAGE, int(run), since, due, begun * PAGE, waits=int(since is not None))
        return self.told(self.turns.may_step(self.seat, work))

    def rests(self) -> None:
        self.told(self.turns.may_step(self.seat, None))

    def told(self, may: bool) -> bool:
        self.model.wanted = math.inf if self.seat.until is None else self.seat.until
        return may


def two(pages: int) -> tuple[MemoryManager, Clock, Loop, Loop]:
    """Models of 40 pages each on a device of so many; the second one came with little room, and streams."""
    plan = fewest(EQUAL, min(40, pages - 41), Fraction(2))
    _, manager, clock, models = a_manager(pages, {}, {"plan": plan}, turn=BOUND)
    first, second = (Loop(manager.turns, model) for model in models)
    return manager, clock, first, second


def test_a_model_that_waits_for_its_turn_is_idle_and_gets_what_it_lacks_when_it_begins() -> None:
    manager, clock, a, b = two(60)
    assert a.asks()
    a.model.step(manager)
    clock.now = 1.0
    assert not b.asks(runs=False, since=1.0)
    assert a.asks(runs=True, since=0.0, begun=20)
    assert manager.reclaim.candidates()[0].client == 2, "what waits gives first"
    clock.now = 3.9
    assert a.asks(runs=True, since=0.0, begun=20)
    assert not b.asks(runs=False, since=1.0)
    streamed, woken = len(b.model.plan.streamed), b.woken
    clock.now = 4.0
    assert not a.asks(runs=True, since=0.0, begun=20), "though it still runs"
    assert b.woken == woken + 1
    assert b.asks(runs=False, since=1.0)
    b.model.step(manager)
    assert len(b.model.plan.streamed) < streamed
    assert a.model.gone, "only what was missing"
    assert a.model.device_pages + b.model.device_pages <= 60


def test_pages_that_were_taken_are_room_once_although_nobody_has_looked_since() -> None:
    plan = fewest(EQUAL, 19, Fraction(2))
    device, manager, clock, models = a_manager(60, {}, {"plan": plan}, turn=BOUND)
    a, b = (Loop(manager.turns, model) for model in models)
    a.model.step(manager)
    assert a.asks(kv=8)
    assert not b.asks(kv=8, runs=False, since=0.0)
    clock.now = 4.0
    assert not a.asks(kv=8)
    assert device.want(30, b.model), "of the model that waits"
    assert b.asks(kv=4, since=0.0)
    assert not a.asks(kv=4, since=0.0), "the device has no more pages than before"


def test_model_that_is_there_as_a_whole_shares_the_turn_of_another_that_leaves_room_for_it() -> None:
    plan = fewest(EQUAL, 5, Fraction(2))
    _, manager, clock, models = a_manager(86, {}, {}, {"plan": plan}, turn=BOUND)
    a, b, c = (Loop(manager.turns, model) for model in models)
    for loop in (a, b):
        assert loop.asks(kv=1)
        loop.model.step(manager)
    b.rests()
    clock.now = 1.0
    assert not c.asks(kv=20, runs=False, since=1.0), "some of it is away"
    assert a.asks(kv=1)
    assert b.asks(kv=1)
    clock.now = 2.0
    assert b.asks(kv=40, begun=40), "nothing that runs is suspended for want of room"
    assert a.asks(kv=1)
    b.rests()
    assert not b.asks(kv=40, since=2.0), "with so much KV there is no room for both"
    b.rests()
    clock.now = 4.0
    a.rests()
    a.model.wanted = b.model.wanted = clock.now
    assert c.asks(kv=20, runs=False, since=1.0)
    streamed = len(c.model.plan.streamed)
    c.model.step(manager)
    assert len(c.model.plan.streamed) < streamed


def test_model_that_had_work_of_late_counts_so_that_another_waits_for_the_answers_that_run() -> None:
    """Three of 40 pages on 85: two have room, and the third has just ended."""
    plan = fewest(EQUAL, 5, Fraction(2))
    _, manager, clock, models = a_manager(86, {}, {}, {"plan": plan}, turn=BOUND)
    a, b, c = (Loop(manager.turns, model) for model in models)
    assert a.asks(kv=20)
    clock.now = 0.1
    a.rests()
    assert b.asks(kv=1)
    b.model.step(manager)
    assert not c.asks(kv=1, runs=False, since=0.1), "its pages would come between two tokens"
    b.rests()
    assert c.asks(kv=1, runs=False, since=0.1)
    c.rests()
    clock.now = 60.0
    assert b.asks(kv=1)
    assert c.asks(kv=1), "what rests for long gives its pages"


def test_requests_of_several_models_that_run_when_turns_begin_are_answered_and_only_one_model_begins_more() -> None:
    """Two of 40 pages on 86: there is room for what has begun, and not for all that waits."""
    manager, _, a, b = two(86)
    assert a.asks(kv=2, begun=2)
    assert b.asks(kv=2, begun=2)
    for _ in range(2):
        assert a.asks(kv=60, runs=True, since=0.0, begun=2)
        assert b.asks(kv=60, runs=True, since=0.0, begun=2), "it is not suspended between two tokens"
        assert [manager.turns.admits(loop.seat) for loop in (a, b)] == [True, False]
    b.rests()
    assert a.asks(kv=60, begun=40)
    assert not b.asks(kv=60, runs=False, since=0.0), "now it is the turn of the other"


def test_loops_that_take_turns_begin_no_more_requests_than_all_have_room_for() -> None:
    manager, _, a, b = two(60)
    assert manager.turns.room(a.seat) == math.inf, "the models share so far"
    assert a.asks()
    a.model.step(manager)
    assert not b.asks(runs=False, since=0.0)
    assert manager.turns.room(a.seat) == 34 * PAGE, "beside 25 of its weights, as 15 hide, and one for tokens"
    b.told(manager.turns.may_step(b.seat, LoopWork(20 * PAGE, True, None, begun=7 * PAGE)))
    assert manager.turns.room(a.seat) == 27 * PAGE, "what the other one's have would have to be moved"


def test_kv_comes_back_at_once_when_the_turn_of_its_model_begins() -> None:
    device, manager, clock, models = a_manager(60, {}, {"plan": fewest(EQUAL, 10, Fraction(2))}, turn=BOUND)
    a, b = (Loop(manager.turns, model) for model in models)
    assert b.asks(kv=8)
    cache = FakeCache(device, manager, clock, model=b.model)
    cache.step(8)
    b.model.wanted = clock.now
    clock.now = 1.0
    assert not a.asks(kv=40, since=1.0)
    clock.now = 1.0 + BOUND
    assert not b.asks(kv=8)
    assert a.asks(kv=40, since=1.0)
    a.model.step(manager)
    for index in range(4):
        cache.take(index)
    a.rests()
    a.model.wanted = clock.now
    assert b.asks(kv=8)
    b.model.step(manager)
    cache.step()
    assert not cache.away, "though nothing has waited for it yet"


def test_kv_of_a_model_that_waits_makes_room_for_the_layers_of_the_one_whose_turn_it_is() -> None:
    plan = {"plan": fewest(EQUAL, 10, Fraction(2))}
    device, manager, clock, models = a_manager(64, plan, plan, turn=BOUND)
    a, b = (Loop(manager.turns, model) for model in models)
    assert a.asks(kv=40)
    cache = FakeCache(device, manager, clock, model=a.model)
    cache.step(40)
    clock.now = 1.0
    assert not b.asks(kv=4, runs=False, since=1.0)
    clock.now = 4.0
    assert not a.asks(kv=40)
    assert b.asks(kv=4, runs=False, since=1.0)
    b.model.step(manager)
    assert not b.model.plan.streamed


def test_the_next_model_comes_as_a_whole_while_answers_of_the_last_end_and_only_it_begins() -> None:
    plan = fewest(EQUAL, 19, Fraction(2))
    _, manager, clock, models = a_manager(100, {}, {"plan": plan}, turn=60.0)
    a, b = (Loop(manager.turns, model) for model in models)

    def asks(loop: Loop, kv: int, begun: int, since: float | None = None) -> bool:
        return loop.told(loop.turns.may_step(loop.seat, LoopWork(kv * PAGE, begun > 0, since, begun=begun * PAGE)))

    assert asks(a, 50, 50)
    a.model.step(manager)
    assert not asks(b, 20, 0, since=0.0)
    assert manager.turns.admits(a.seat)
    clock.now = 50.0  # longer than the patience, less than the bound
    assert asks(a, 50, 50)
    assert not manager.turns.admits(a.seat), "others have waited for long"
    assert not asks(b, 20, 0, since=0.0), "there is no room for it yet"
    assert asks(a, 30, 10)
    assert asks(b, 20, 0, since=0.0)
    assert manager.turns.admits(b.seat)
    assert not manager.turns.admits(a.seat)
    b.model.step(manager)
    assert not b.model.plan.streamed, "all that it lacked has come"
    assert asks(a, 30, 10), "beside it"
    assert not asks(a, 20, 0, since=50.0), "what runs has ended, and it has more to do"
    assert asks(b, 20, 20)
    assert manager.turns.admits(b.seat)


def test_prompts_of_several_loops_are_computed_one_after_the_other() -> None:
    manager, _, a, b = two(120)
    assert manager.turns.may_prompt(a.seat, 1.0)
    assert not manager.turns.may_prompt(b.seat, 2.0), "it came later"
    assert manager.turns.may_prompt(a.seat, 1.0)
    assert not manager.turns.may_prompt(a.seat, 3.0), "the next one of it came later"
    assert b.woken == 1
    assert manager.turns.may_prompt(b.seat, 2.0)
    assert not manager.turns.may_prompt(b.seat, None), "there is none"
    assert manager.turns.may_prompt(a.seat, 3.0)


def test_loop_whose_prompt_waits_for_memory_or_that_is_gone_holds_up_nobody() -> None:
    manager, clock, a, b = two(120)
    assert manager.turns.may_prompt(a.seat, 1.0)
    manager.turns.may_prompt(a.seat, None)  # it found no memory
    assert manager.turns.may_prompt(b.seat, 2.0)
    assert manager.turns.may_prompt(a.seat, 1.0), "its turn again"
    clock.now += BOUND
    assert manager.turns.may_prompt(b.seat, 2.0), "the other one has not asked for long"
    assert manager.turns.may_prompt(a.seat, 1.0)
    number = a.seat.number
    del a
    gc.collect()
    assert manager.turns.may_prompt(b.seat, 2.0)
    assert number in manager.turns.seats, "it is removed at the next step"


def test_models_that_fit_share_and_nobody_waits() -> None:
    manager, clock, a, b = two(140)
    for _ in range(20):
        clock.now += 1.0
        assert a.asks()
        assert b.asks()
    assert all(manager.turns.admits(loop.seat) for loop in (a, b))


def test_the_turn_ends_with_the_last_request_or_with_the_loop() -> None:
    _, clock, a, b = two(60)
    assert a.asks()
    assert not b.asks(since=0.0)
    a.rests()
    assert b.woken == 1
    assert b.asks(since=0.0)
    assert not a.asks(runs=False, since=0.0)
    turns = a.turns
    model = b.model
    del b
    gc.collect()
    assert a.asks(runs=False, since=0.0), "of a loop that has died"
    assert model.wanted == math.inf
    assert turns.admits(a.seat)
    clock.now += 1.0
    assert a.asks()


def test_a_burst_is_priced_by_the_one_before_it_until_that_has_faded() -> None:
    for pause, waits_then in ((5.0, True), (100.0, False)):
        _, clock, a, b = two(84)
        assert a.asks(kv=40)
        assert not b.asks(kv=40, since=0.0, begun=40)
        a.rests()
        b.rests()
        clock.now += pause
        assert a.asks(kv=1)
        assert b.asks(kv=1, since=clock.now) is not waits_then


def test_until_the_link_is_measured_models_share() -> None:
    _, manager, _, models = a_manager(60, {}, {"plan": fewest(EQUAL, 15, Fraction(2))}, turn=BOUND, bandwidth=None)
    a, b = (Loop(manager.turns, model) for model in models)
    assert a.asks()
    assert b.asks()
    manager.link.bandwidth = LINK
    assert a.asks()
    assert b.asks(), "what runs is answered"
    b.rests()
    assert not b.asks(since=0.0), "though nobody's work is another"
