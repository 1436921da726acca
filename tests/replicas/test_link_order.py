"""The exchange of KV: everybody gets what belongs to its layers, and no activation waits for more than one part."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.replicas.link_order import LinkOrder, Sent, part_bytes, shares, waited


@given(st.integers(0, 10**6), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.data())
def test_each_member_keeps_its_own_part_and_sends_the_rest(used: int, layers: list[int], data: st.DataObject) -> None:
    own = data.draw(st.integers(0, len(layers) - 1))
    found = shares(used, layers, own)
    assert found[own] == 0
    assert sum(found) == pytest.approx(used * (1 - layers[own] / sum(layers)), abs=1)
    for nbytes, count in zip(found[:own] + found[own + 1 :], layers[:own] + layers[own + 1 :], strict=True):
        assert nbytes == pytest.approx(used * count / sum(layers), abs=1)


def test_of_equal_members_each_sends_all_but_its_part() -> None:
    assert sum(shares(4000, (5, 5, 5, 5), 2)) == 4000 * 3 // 4
    assert shares(4000, (1, 4), None) == (800, 3200), "from the host each gets its part"


def test_parts_are_whole_pages_of_a_quarter_of_a_stage() -> None:
    assert part_bytes(0.040, 1e9, 2**20) == 9 * 2**20, "10 MB"
    assert part_bytes(1e-6, 1e9, 2**20) == 2**20, "never less than a page"


messages = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.booleans()), max_size=30)


def played(script: list[tuple[int, int, bool]], part: int) -> list[Sent]:
    """The log of a link of a byte a second. `script`: when, how many bytes, is it urgent?"""
    link, now, due, ends = LinkOrder(part), 0.0, sorted(script, key=lambda each: each[0]), None
    while due or ends is not None:
        now = min([float(at) for at, _, _ in due[:1]] + [each for each in (ends,) if each is not None])
        if ends == now:
            link.end(now)
            ends = None
        while due and due[0][0] == now:
            at, nbytes, urgent = due.pop(0)
            link.queue(f"{at}/{nbytes}", nbytes, now, urgent=urgent)
        nbytes = link.begin(now)
        ends = ends if nbytes is None else now + nbytes
    return link.log


@given(messages, st.integers(1, 8))
def test_an_activation_waits_for_one_part_at_most(script: list[tuple[int, int, bool]], part: int) -> None:
    log = played(script, part)
    assert waited(log) <= 1
    assert sum(each.nbytes for each in log) == sum(nbytes for _, nbytes, _ in script)
    assert all(each.nbytes <= part for each in log if not each.urgent)
    for sooner, later in pairwise(log):
        assert sooner.ended <= later.began, "the link sends one thing at a time"
    for urgent in (True, False):
        queued = [each.queued for each in log if each.urgent == urgent]
        assert queued == sorted(queued), "and what is alike in order"
    for each in log:
        busy = sum(it.nbytes for it in log if it.began < each.began and it.ended > each.queued)
        assert each.began - each.queued <= busy, "and never idles while something waits"


def test_the_log_shows_a_link_that_let_an_activation_wait() -> None:
    bulk = [Sent("kv", 4, False, 0.0, at, at + 4) for at in (0.0, 4.0, 8.0)]
    assert waited([*bulk, Sent("activation", 1, True, 1.0, 12.0, 13.0)]) == 3
    assert waited([bulk[0], Sent("activation", 1, True, 1.0, 4.0, 5.0)]) == 1
    assert waited(bulk) == 0


def test_a_link_that_is_busy_begins_nothing_and_an_idle_one_ends_nothing() -> None:
    link = LinkOrder(4)
    assert link.begin(0.0) is None
    with pytest.raises(RuntimeError, match="has not begun"):
        link.end(0.0)
    link.queue("kv", 6, 0.0, urgent=False)
    link.queue("activation", 1, 0.0, urgent=True)
    assert link.begin(1.0) == 1
    assert link.begin(1.0) is None
    link.end(2.0)
    assert [link.begin(2.0), link.end(6.0).nbytes, link.begin(6.0)] == [4, 4, 2]
    with pytest.raises(ValueError, match="parts of 0"):
        LinkOrder(0)
