"""Drops and restores: which groups merge (paper 003, Fig. 6), with which spans and in how many comparisons; whether
that pays, by the work of groups; against rules, all other choices, and sums by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, pairwise, permutations
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.replicas.controller import busiest, merged_work, split, work_of
from ballonet.offload.policy.replicas.drops import (
    DropPlan,
    Work,
    _dealt,
    drain_seconds,
    drop_plan,
    gross_needed,
    judge,
    with_growth,
)
from ballonet.offload.policy.replicas.groups import Group, Span, alone, check_groups, pulled, regroup, slot
from ballonet.offload.policy.replicas.protocol import Decline, Load, Prepare
from ballonet.offload.policy.replicas.requests import RequestEntry
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

from .controller_scene import KV, ControllerScene, of_kind

LAYER_PAGES = st.lists(st.integers(1, 9), min_size=2, max_size=12)


def pair(first: int, second: int, cut: int, layers: int) -> Group:
    return Group((first, second), (Span(0, cut), Span(cut, layers)))


def after(groups: list[Group], plan: DropPlan) -> list[Group]:
    """The groups once the plan is carried out: those that it forms, and those that it leaves."""
    merged = {member for group in plan.formed for member in group.members}
    return [*plan.formed, *(group for group in groups if merged.isdisjoint(group.members))]


def net_freed(groups: list[Group], pages: list[int]) -> int:
    """Pages that groups have freed, compared with undropped replicas: one model for each merge, less slots."""
    slots = sum(slot(span, pages) for group in groups for span in group.spans)
    return sum(group.size - 1 for group in groups) * sum(pages) - slots


@pytest.mark.parametrize(
    ("members", "spans"),
    [
        ((), ()),
        ((1, 2), (Span(0, 4),)),
        ((1, 1), (Span(0, 2), Span(2, 4))),
        ((1, 2), (Span(0, 2), Span(3, 4))),  # layer 2 is nobody's
        ((1, 2), (Span(0, 3), Span(2, 4))),  # layer 2 is twice there
        ((1, 2), (Span(1, 2), Span(2, 4))),  # layer 0 is nobody's
        ((1, 2), (Span(2, 4), Span(0, 2))),
    ],
)
def test_a_group_without_each_layer_once_is_refused(members: tuple[int, ...], spans: tuple[Span, ...]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Group(members, spans)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (2, 2), (3, 2)])
def test_a_span_has_a_layer(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="no span"):
        Span(begin, end)


def test_holder_of_a_layer_and_span_of_a_member_are_looked_up() -> None:
    group = pair(7, 3, 5, 12)
    assert [group.holder(layer) for layer in (0, 4, 5, 11)] == [7, 7, 3, 3]
    assert group.span(3) == Span(5, 12)
    assert (group.is_dropped, alone(1, 12).is_dropped) == (True, False)
    for key, look_up in ((12, group.holder), (4, group.span)):
        with pytest.raises(KeyError):
            look_up(key)


def test_groups_are_checked_together() -> None:
    check_groups([alone(1, 4), pair(2, 3, 2, 4)], 4)
    with pytest.raises(ValueError, match="in two groups"):
        check_groups([alone(2, 4), pair(2, 3, 2, 4)], 4)
    with pytest.raises(ValueError, match="in two groups"):
        check_groups([pair(2, 3, 2, 4), alone(3, 4)], 4)
    with pytest.raises(ValueError, match="4 of 5"):
        check_groups([alone(1, 4)], 5)


def test_groups_of_one_two_and_three_merge_as_in_the_paper() -> None:
    """§4.1: of groups with 1, 2 and 3 instances, those with 1 and 2 merge."""
    three = Group((4, 5, 6), (Span(0, 4), Span(4, 8), Span(8, 12)))
    plan = drop_plan([three, alone(1, 12), pair(2, 3, 6, 12)], needed=1, pages=[1] * 12)
    assert [{*group.members} for group in plan.formed] == [{1, 2, 3}]


def test_of_groups_alike_those_that_are_given_first_merge() -> None:
    plan = drop_plan([alone(member, 4) for member in (3, 1, 0, 2)], 1, [5] * 4)
    assert [{*group.members} for group in plan.formed] == [{1, 3}]


def test_the_plan_stops_once_enough_is_freed() -> None:
    replicas = [alone(number, 12) for number in range(8)]
    plans = {needed: drop_plan(replicas, needed, [25] * 12) for needed in (0, 1, 300, 301, 1200, 1201, 1500, 10**9)}
    sizes = {needed: sorted(group.size for group in after(replicas, plan)) for needed, plan in plans.items()}
    ones, twos = [1] * 6 + [2], [1] * 4 + [2, 2]
    assert sizes == {
        0: [1] * 8,
        1: ones,
        300: ones,
        301: twos,
        1200: [2] * 4,
        1201: [2, 2, 4],
        1500: [2, 2, 4],
        10**9: [8],
    }


def test_twelve_layers_of_25_pages_of_which_each_of_two_drops_six() -> None:
    """125 of 150 pages are freed on each."""
    assert drop_plan([alone(1, 12), alone(2, 12)], 1, [25] * 12) == DropPlan((pair(1, 2, 6, 12),), {})
    assert net_freed([pair(1, 2, 6, 12)], [25] * 12) == 250


def test_more_replicas_than_layers_leave_several_groups() -> None:
    replicas = [alone(number, 3) for number in range(8)]
    groups = after(replicas, drop_plan(replicas, 10**9, [1] * 3))
    check_groups(groups, 3)
    assert sorted(group.size for group in groups) == [2, 2, 2, 2]  # two of these would need four layers


@given(st.integers(1, 24), st.integers(0, 400), LAYER_PAGES)
def test_any_plan_in_several_levels(replicas: int, needed: int, pages: list[int]) -> None:
    """Every group keeps a complete copy, enough is freed if it can be, spans lie inside the old ones, and one merge
    less would not have been enough."""
    groups: list[Group] = [alone(number, len(pages)) for number in range(replicas)]
    for _ in range(3):
        plan = drop_plan(groups, needed, pages)
        new = after(groups, plan)
        check_groups(new, len(pages))
        assert sorted(member for group in new for member in group.members) == list(range(replicas))
        merges, model = len(groups) - len(new), sum(pages)
        if len(new) > 1 and min(a.size + b.size for a, b in combinations(new, 2)) <= len(pages):
            assert merges * model >= needed
        assert merges == 0 or (merges - 1) * model < needed
        held = {member: span for old in groups for member, span in zip(old.members, old.spans, strict=True)}
        for group in plan.formed:
            missing = {
                member: tuple(layer for layer in group.span(member).layers if layer not in held[member])
                for member in group.members
            }
            assert {member: layers for member, layers in missing.items() if layers} == {
                member: plan.pulls[member] for member in group.members if member in plan.pulls
            }
        groups = new


@given(st.integers(2, 24), st.integers(1, 300), st.lists(st.integers(1, 9), min_size=5, max_size=12))
def test_drop_for_the_gross_pages_frees_the_needed_ones_net(replicas: int, needed: int, pages: list[int]) -> None:
    groups: list[Group] = [alone(number, len(pages)) for number in range(replicas)]
    for _ in range(3):
        gross = gross_needed(needed, pages)
        if gross is None:
            assert sum(pages) <= 2 * max(pages)
            return
        new = after(groups, drop_plan(groups, gross, pages))
        is_enough = (len(groups) - len(new)) * sum(pages) >= gross
        assert not is_enough or net_freed(new, pages) - net_freed(groups, pages) >= needed
        groups = new


def test_growth_is_worth_pairs_and_no_more() -> None:
    """8 replicas, 12 layers of 25 pages: each pair frees 250 net."""
    ones, pages = [alone(number, 12) for number in range(8)], [25] * 12
    asked = [with_growth(ones, needed, growth, pages) for needed, growth in ((1, 0), (1, 249), (1, 250), (1, 9999))]
    assert asked == [2, 300, 302, 1200]
    assert len(drop_plan(ones, 1200, pages).formed) == 4
    assert with_growth(ones, 1300, 9999, pages) == 1560  # what is queued is worth more levels
    assert with_growth([pair(1, 2, 6, 12), alone(3, 12)], 1, 9999, pages) == 2
    assert with_growth([alone(1, 2), alone(2, 2)], 1, 1, [5, 5]) is None


def test_two_layers_free_nothing() -> None:
    """Each of two members would hold one layer, and a slot for the other."""
    assert gross_needed(1, [5, 5]) is None
    assert net_freed([*drop_plan([alone(1, 2), alone(2, 2)], 1, [5, 5]).formed], [5, 5]) == 0


def test_a_slot_is_as_large_as_the_largest_layer_that_is_dropped() -> None:
    assert [slot(span, [3, 9, 4, 1]) for span in (Span(0, 1), Span(0, 2), Span(1, 4), Span(0, 4))] == [9, 4, 3, 0]


def test_two_pairs_merge_without_a_pull() -> None:
    plan = drop_plan([pair(1, 2, 6, 12), pair(3, 4, 6, 12)], 1, [1] * 12)
    assert plan.pulls == {}
    assert plan.formed == (Group((1, 3, 2, 4), (Span(0, 3), Span(3, 6), Span(6, 9), Span(9, 12))),)


def test_a_pair_and_a_whole_replica_share_evenly() -> None:
    plan = drop_plan([pair(1, 2, 6, 12), alone(3, 12)], 1, [1] * 12)
    assert plan.formed == (Group((1, 3, 2), (Span(0, 4), Span(4, 8), Span(8, 12))),)


def test_spans_are_even_in_pages_and_not_in_layers() -> None:
    assert regroup({1: Span(0, 4), 2: Span(0, 4)}, [1, 1, 1, 3]) == pair(1, 2, 3, 4)


def test_layers_outside_the_old_spans_are_pulled() -> None:
    """Two who hold layer 0 only, and two who hold the rest: one has to take over a layer."""
    held = {1: Span(0, 1), 2: Span(1, 4), 3: Span(0, 1), 4: Span(1, 4)}
    group = regroup(held, [1] * 4)
    assert pulled(group, held) == {3: (1,)}


def test_more_members_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 members cannot share 2 layers"):
        regroup(dict.fromkeys(range(3), Span(0, 2)), [1, 1])


@given(st.lists(st.integers(1, 5), min_size=4, max_size=7), st.data())
def test_no_other_spans_pull_fewer_pages_or_are_as_few_and_more_even(pages: list[int], data: st.DataObject) -> None:
    """All cuts are tried in the order that was chosen; and in all orders, where there is one that pulls nothing."""
    layers = len(pages)
    held: dict[int, Span] = {}
    for first in (1, 3):
        if data.draw(st.booleans()):
            held[first] = Span(0, layers)
        else:
            cut = data.draw(st.integers(1, layers - 1))
            held |= {first: Span(0, cut), first + 1: Span(cut, layers)}
    group = regroup(held, pages)
    chosen = price(dict(zip(group.members, group.spans, strict=True)), held, pages)
    prices = {
        order: min(price(dict(zip(order, spans, strict=True)), held, pages) for spans in cuts(layers, len(held)))
        for order in permutations(held)
    }
    assert chosen == prices[group.members]
    if min(prices.values())[0] == 0:
        assert chosen[0] == 0


def cuts(layers: int, count: int) -> list[tuple[Span, ...]]:
    ways = []
    for inner in combinations(range(1, layers), count - 1):
        ends = (0, *inner, layers)
        ways.append(tuple(Span(begin, end) for begin, end in pairwise(ends)))
    return ways


def price(spans: dict[int, Span], held: dict[int, Span], pages: list[int]) -> tuple[int, int]:
    """Pages pulled, and the sum of the squares of the pages of each span."""
    return (
        sum(pages[layer] for member, span in spans.items() for layer in span.layers if layer not in held[member]),
        sum(sum(pages[span.begin : span.end]) ** 2 for span in spans.values()),
    )


class Counted(int):
    """A replica's number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("needed", [10**9, 40 * 2000])
def test_a_plan_for_n_replicas_takes_n_log_n_comparisons(needed: int) -> None:
    counts = {}
    for replicas in (500, 1000, 2000, 4000):
        groups = [alone(Counted(number), 40) for number in range(replicas)]
        Counted.compared = 0
        drop_plan(groups, needed, [1] * 40)
        counts[replicas] = Counted.compared
    assert all(count <= 12 * replicas * log2(replicas) for replicas, count in counts.items()), counts
    assert counts[4000] > 4000  # it does count


# Does a drop pay?


TUNING = ReplicaTuning(chunk=512, bubble=0.1, gain=0.05)


class Linear:
    """`token` seconds for each token of a prompt, `step` for each microbatch, `old` for each token before a chunk."""

    def __init__(self, token: float = 0.0, step: float = 0.0, old: float = 0.0) -> None:
        self.token, self.step, self.old = token, step, old
        self.batches = 0

    def seconds(self, before: int, new: int) -> float:
        return self.step + self.old * before + self.token * new

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        self.batches += 1
        return self.step + sum(self.old * before + self.token * new for before, new in chunks)


def test_prompts_that_fit_take_their_chunks() -> None:
    """600 and 400 tokens: 512 and 488 in two rounds; while the second runs no request decodes."""
    work = Work(10_000, 1, [(600, 10), (400, 10)])
    assert drain_seconds(work, Linear(token=0.001, step=0.1), TUNING) == pytest.approx(1.0 + 0.2)


def test_a_prompt_waits_until_one_that_runs_ends() -> None:
    """One that runs has 50 tokens to go, 0.1 s each; then a round for the prompt."""
    work = Work(1000, 1, [(500, 100)], [(800, 50)])
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(5.0 + 0.1)


def test_requests_that_end_at_different_times_make_room_one_by_one() -> None:
    """300 + 100 tokens fit after the second has ended: 200 are free after 10 rounds, 400 after 30."""
    work = Work(1000, 1, [(300, 100)], [(190, 10), (170, 30), (100, 500)])
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(3.0 + 0.1)


def test_a_pipeline_shares_the_cost_of_its_microbatches() -> None:
    """1,024 tokens in two microbatches of 0.6 s each, on two stages: 0.6 s, and a tenth more for the bubble."""
    work = Work(10_000, 2, [(1024, 1)])
    assert drain_seconds(work, Linear(token=0.001, step=0.088), TUNING) == pytest.approx(0.6 * 1.1)


def test_tokens_before_a_chunk_cost() -> None:
    work = Work(10_000, 1, [(1024, 1)])
    assert drain_seconds(work, Linear(old=1.0), TUNING) == pytest.approx(512.0)


def test_requests_whose_kv_is_exchanged_wait() -> None:
    """The requests have 10 tokens to go, from 2 s on; the prompt needs what they hold."""
    work = Work(1000, 1, [(500, 100)], [(800, 10)], stall=2.0)
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(2.0 + 1.0 + 0.1)
    fits = Work(2000, 1, [(500, 100)], [(800, 10)], stall=2.0)
    assert drain_seconds(fits, Linear(step=0.1), TUNING) == pytest.approx(0.1)


def test_requests_of_an_exchange_join_those_that_run_when_it_is_over() -> None:
    """The first prompt runs at once and would decode for 400 rounds; after 2 s those that were stalled run too."""
    work = Work(1000, 1, [(200, 400), (300, 60)], [(300, 5)], stall=2.0)
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(2.0 + 0.5 + 0.1)


def test_a_prompt_that_never_fits_takes_for_ever() -> None:
    assert drain_seconds(Work(100, 1, [(200, 1)]), Linear(step=0.1), TUNING) == math.inf
    assert drain_seconds(Work(100, 1, []), Linear(step=0.1), TUNING) == 0.0


def test_a_load_that_waits_for_memory_drops() -> None:
    """Two replicas of 1,000 tokens, of which the model took as much: 3,000 together. Decoding takes long."""
    cost = Linear(token=0.0001, step=0.05)
    apart = Work(1000, 1, [(400, 100)], [(500, 400)])
    both = Work(3000, 2, [(400, 100)] * 2, [(500, 400)] * 2, stall=1.0)
    verdict = judge([apart, apart], both, cost, TUNING)
    assert verdict.helps
    assert verdict.dropped < verdict.kept / 10


def test_a_load_that_waits_for_its_prompts_to_be_computed_does_not() -> None:
    """As much is queued, and what runs is nearly done: memory is there before the prompts are computed."""
    cost = Linear(token=0.01, step=0.001)
    apart = Work(1000, 1, [(400, 1)] * 8, [(500, 2)])
    both = Work(3000, 2, [(400, 1)] * 16, [(500, 2)] * 2, stall=1.0)
    verdict = judge([apart, apart], both, cost, TUNING)
    assert not verdict.helps
    assert verdict.dropped > verdict.kept


def test_two_that_never_end_are_no_gain() -> None:
    never = Work(100, 1, [(200, 1)])
    assert not judge([never], never, Linear(step=1.0), TUNING).helps
    assert judge([never], Work(300, 2, [(200, 1)]), Linear(step=1.0), TUNING).helps


def test_groups_count_for_their_replicas() -> None:
    cost = Linear(step=0.1)
    fast, slow = Work(1000, 1, [(500, 100)], [(900, 90)]), Work(2000, 3, [(500, 100)], [(1000, 500)])
    verdict = judge([fast, slow], Work(3000, 4, []), cost, TUNING)
    seconds = [drain_seconds(work, cost, TUNING) for work in (fast, slow)]
    assert seconds[0] < TUNING.dwell < seconds[1]
    assert verdict.kept == pytest.approx((seconds[0] + 3 * seconds[1]) / 4)


def test_a_short_queue_is_no_reason_where_a_pipeline_is_slower_for_what_follows() -> None:
    """Prompts are what takes time, so a pair is slower by the bubble; but two queues that differ are drained sooner by
    both, and the memory that one waits for is there."""
    cost = Linear(token=0.002)
    long, idle = Work(1000, 1, [(300, 1)] * 3, [(900, 2)]), Work(1000, 1, [])
    both = Work(3000, 2, long.queued, long.running)
    assert drain_seconds(both, cost, TUNING) < 0.6 * drain_seconds(long, cost, TUNING)
    verdict = judge([long, idle], both, cost, TUNING)
    assert not verdict.helps
    assert verdict.kept > 0.5 * TUNING.dwell, "as if demand went on"
    memory = Linear(step=0.1)  # but where a step takes as long whatever is in it, twice the memory is
    held, more = Work(1000, 1, [(300, 20)] * 3, [(900, 9)]), Work(3000, 2, [(300, 20)] * 6, [(900, 9)] * 2)
    assert judge([held, held], more, memory, TUNING).helps


def test_demand_that_goes_on_is_dealt_out_by_replicas() -> None:
    """Each replica gets as much of it, so a group of two gets twice what one gets, and each request is in one."""
    parts = [Work(100, 1, [(10, 1)]), Work(100, 2, [(20, 1)]), Work(100, 1, [])]
    dealt = _dealt(parts, [(n, 1) for n in range(30, 50)])
    assert sorted(queued for work in dealt for queued in work.queued) == [
        (10, 1),
        (20, 1),
        *((n, 1) for n in range(30, 50)),
    ]
    assert [len(work.queued) for work in dealt] == [1 + 5, 1 + 10, 5]
    assert dealt[0].queued[0] == (10, 1)


REQUESTS = st.lists(st.tuples(st.integers(1, 900), st.integers(0, 60)), max_size=8)


@given(REQUESTS, REQUESTS, st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 3))
def test_more_memory_never_takes_for_ever_where_less_does_not(
    queued: list[tuple[int, int]], running: list[tuple[int, int]], capacity: int, more: int, stages: int
) -> None:
    cost = Linear(token=0.001, step=0.01)
    seconds = drain_seconds(Work(capacity, stages, queued, running), cost, TUNING)
    if max((prompt + max(1, new) for prompt, new in queued), default=0) <= capacity:
        assert seconds < math.inf
        assert drain_seconds(Work(capacity + more, stages, queued, running), cost, TUNING) < math.inf
    tokens = sum(prompt for prompt, _ in queued)
    assert seconds >= tokens * 0.001 / stages - 1e-9  # never faster than its prompts alone


def test_a_prediction_costs_few_evaluations() -> None:
    """256 that run and 64 that wait: not a round for each of 1,000 tokens."""
    cost = Linear(token=0.0001, step=0.01)
    work = Work(256 * 2000, 1, [(1500, 400)] * 64, [(1000, 1000 - number) for number in range(256)])
    drain_seconds(work, cost, TUNING)
    assert cost.batches < 1000


# The work of groups


HALVES = Group((0, 1), (Span(0, 6), Span(6, 12)))


def entries_of(*sizes: tuple[int, int]) -> list[RequestEntry]:
    return [RequestEntry(f"r{number}", prompt, new, number, 5) for number, (prompt, new) in enumerate(sizes)]


def test_the_newest_wait_until_their_prompts_are_what_is_pending() -> None:
    entries = entries_of((800, 100), (400, 100), (79, 20))
    assert split(entries, 0, 0, KV)[0] == []
    assert split(entries, 0, 10, KV)[0] == [(79, 20)]  # 80 tokens are 10 pages
    assert split(entries, 0, 11, KV)[0] == [(400, 100), (79, 20)]
    assert split(entries, 0, 10**6, KV) == ([(800, 100), (400, 100), (79, 20)], [])


def test_running_requests_are_equally_far_with_their_answers() -> None:
    """1,200 tokens of prompts; 100 of 400 new ones make 1,300, which are 163 pages."""
    entries = entries_of((800, 100), (400, 300))
    assert split(entries, 163, 0, KV)[1] == [(826, 74), (478, 222)]
    assert split(entries, 10, 0, KV)[1] == [(800, 100), (400, 300)]
    assert split(entries, 10**6, 0, KV)[1] == [(900, 1), (700, 1)]


def test_a_merged_group_has_the_work_of_all_and_exchanges_first() -> None:
    """Half of the 600 pages of the fuller one go, at 10 ms each."""
    scene = ControllerScene(2)
    for prompt, new in ((4600, 600), (4600, 600), (400, 100), (400, 100)):
        scene.arrive(prompt, new)
    scene.load(used=600, free=5, pending=51)
    scene.tell(Load, 1, scene.epoch(1), 500, 5, 51, 99)
    cluster, book = scene.controller.cluster, scene.controller.book
    parts = [work_of(cluster.groups[(member,)].group, cluster, book) for member in (0, 1)]
    assert parts[0] == Work(5600, 1, [(400, 100)], [(4800, 400)])
    assert merged_work(HALVES, parts, cluster, 0.01) == Work(
        13200, 2, [(400, 100)] * 2, [parts[0].running[0], parts[1].running[0]], 3.0
    )


def test_the_group_with_most_pending_is_judged() -> None:
    scene = ControllerScene(4)
    other = Group((2, 3), HALVES.spans)
    assert busiest([other, HALVES], scene.controller.cluster) == HALVES
    scene.tell(Load, 3, scene.epoch(3), 10, 690, 5, 99)
    assert busiest([HALVES, other], scene.controller.cluster) == other


def test_an_exchange_that_takes_too_long_is_not_worth_it() -> None:
    """What runs ends soon; then two that wait fit one by one on each replica, and all four into the pair."""
    assert [answer_to_a_burst(seconds) for seconds in (0.0, 0.001, 0.1)] == [Prepare, Prepare, Decline]


def answer_to_a_burst(page_seconds: float) -> type[object]:
    """What the controller answers where a page takes so long."""
    scene = ControllerScene(2, page_seconds=page_seconds)
    for prompt, new, count in ((4600, 600, 2), (3000, 300, 4)):
        for _ in range(count):
            scene.arrive(prompt, new)
    scene.load(used=645, free=5, pending=752)
    return type(scene.tick()[-1])


def test_replicas_merge_where_requests_wait() -> None:
    """What waits in a replica is computed there, so room elsewhere does not help it."""
    scene = ControllerScene(6)
    for prompt, new, count in ((4600, 600, 6), (400, 100, 12)):
        for _ in range(count):
            scene.arrive(prompt, new)
    scene.load(used=600, free=5, pending=0, members=(0, 1, 3, 5))
    scene.load(used=600, free=5, pending=102, members=(2, 4))
    (action,) = of_kind(Prepare, scene.tick())
    assert {*action.groups[0].members} == {2, 4}
