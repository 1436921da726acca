"""Groups and spans, and which groups merge (paper 003, Fig. 6): against the rule, against all other spans, and in
comparisons for thousands of replicas."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.replicas.drops import DropPlan, drop_plan, gross_needed, with_growth
from ballonet.offload.policy.replicas.groups import Group, Span, alone, check_groups, pulled, regroup, slot

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


def test_who_holds_a_layer() -> None:
    group = pair(7, 3, 5, 12)
    assert [group.holder(layer) for layer in (0, 4, 5, 11)] == [7, 7, 3, 3]
    assert group.span(3) == Span(5, 12)
    assert (group.is_dropped, alone(1, 12).is_dropped) == (True, False)
    for key, found in ((12, group.holder), (4, group.span)):
        with pytest.raises(KeyError):
            found(key)


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
def test_what_is_asked_for_the_slots_as_well_is_enough(replicas: int, needed: int, pages: list[int]) -> None:
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


def test_what_does_not_lie_inside_is_pulled() -> None:
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
    found = price(dict(zip(group.members, group.spans, strict=True)), held, pages)
    prices = {
        order: min(price(dict(zip(order, spans, strict=True)), held, pages) for spans in cuts(layers, len(held)))
        for order in permutations(held)
    }
    assert found == prices[group.members]
    if min(prices.values())[0] == 0:
        assert found[0] == 0


def cuts(layers: int, count: int) -> list[tuple[Span, ...]]:
    found = []
    for inner in combinations(range(1, layers), count - 1):
        ends = (0, *inner, layers)
        found.append(tuple(Span(begin, end) for begin, end in pairwise(ends)))
    return found


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
