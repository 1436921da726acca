"""The input of the drop gate: queued requests, progress of the running ones, and the work of a merged group."""

from __future__ import annotations

from ballonet.offload.policy.replicas.controller import busiest, merged_work, split, work_of
from ballonet.offload.policy.replicas.drops import Work
from ballonet.offload.policy.replicas.groups import Group, Span
from ballonet.offload.policy.replicas.protocol import Decline, Load, Prepare
from ballonet.offload.policy.replicas.requests import RequestEntry

from .controller_scene import KV, ControllerScene, of_kind

PAIR = Group((0, 1), (Span(0, 6), Span(6, 12)))


def requests(*sizes: tuple[int, int]) -> list[RequestEntry]:
    return [RequestEntry(f"r{number}", prompt, new, number, 5) for number, (prompt, new) in enumerate(sizes)]


def test_the_newest_wait_until_their_prompts_are_what_is_pending() -> None:
    entries = requests((800, 100), (400, 100), (79, 20))
    assert split(entries, 0, 0, KV)[0] == []
    assert split(entries, 0, 10, KV)[0] == [(79, 20)]  # 80 tokens are 10 pages
    assert split(entries, 0, 11, KV)[0] == [(400, 100), (79, 20)]
    assert split(entries, 0, 10**6, KV) == ([(800, 100), (400, 100), (79, 20)], [])


def test_those_that_run_are_equally_far_with_what_they_generate() -> None:
    """1,200 tokens of prompts; 100 of 400 new ones make 1,300, which are 163 pages."""
    entries = requests((800, 100), (400, 300))
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
    assert merged_work(PAIR, parts, cluster, 0.01) == Work(
        13200, 2, [(400, 100)] * 2, [parts[0].running[0], parts[1].running[0]], 3.0
    )


def test_the_group_with_most_pending_is_judged() -> None:
    scene = ControllerScene(4)
    other = Group((2, 3), PAIR.spans)
    assert busiest([other, PAIR], scene.controller.cluster) == PAIR
    scene.tell(Load, 3, scene.epoch(3), 10, 690, 5, 99)
    assert busiest([PAIR, other], scene.controller.cluster) == other


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


def test_those_merge_where_requests_wait() -> None:
    """What waits in a replica is computed there, so room elsewhere does not help it."""
    scene = ControllerScene(6)
    for prompt, new, count in ((4600, 600, 6), (400, 100, 12)):
        for _ in range(count):
            scene.arrive(prompt, new)
    scene.load(used=600, free=5, pending=0, members=(0, 1, 3, 5))
    scene.load(used=600, free=5, pending=102, members=(2, 4))
    (action,) = of_kind(Prepare, scene.tick())
    assert {*action.groups[0].members} == {2, 4}
