"""A closed loop under a load that comes and goes: at most one drop and one restore in each period.

The replicas are a few sums: a request holds KV from when it fits into its group until it has decoded for its time.
"""

from __future__ import annotations

import pytest

from ballonet.offload.policy.replicas.protocol import Finished, Load, Prepare, StartRestore
from ballonet.offload.policy.tuning import DEFAULT

from .played import KV, Cost, Played


class Loop(Played):
    """Requests of 252 + 28 tokens, each decoded for 8 s once it has room in its group: 20 for each replica that has
    dropped nothing, 23 in a pair."""

    def __init__(self, members: int) -> None:
        self.since: dict[str, float] = {}
        self.changes: list[tuple[float, str]] = []
        self.looks = False
        super().__init__(members, DEFAULT.replicas, Cost(step=8 / 28))

    def _check(self) -> None:
        if self.looks:
            super()._check()

    def run(self, seconds: float, rate: float) -> None:
        due = 0.0
        for _ in range(round(seconds / 0.1)):
            due += rate * 0.1
            while due >= 1:
                due -= 1
                self.arrive(252, 28)
            self.step()
        self.looks = True
        self._check()
        self.looks = False

    def step(self) -> None:
        """A period passes."""
        for name, since in [*self.since.items()]:
            if self.at - since > 8.0:
                del self.since[name]
                self.on(Finished(self.at, name))
        self.progress += 1
        for members in self.groups():
            self._group(members)
        for action in self.tick():
            if isinstance(action, Prepare):
                self.changes.append((self.at, "drop" if action.groups[0].is_dropped else "restore"))
                for done in self.all_prepared():
                    if isinstance(done, StartRestore):
                        self.all_restored()
                self.settled()

    def _group(self, members: tuple[int, ...]) -> None:
        """Starts what fits, and tells the load."""
        placement = self.controller.cluster.groups[members]
        tokens = self.controller.cluster.tokens(placement.group)
        requests = self.controller.book.of(members)
        waiting = [each for each in requests if each.name not in self.since]
        room = max(0, tokens // 280 - len(requests) + len(waiting))
        for each in waiting[:room]:
            self.since[each.name] = self.at
        pages, used = KV.pages(tokens) // len(members), (len(requests) - len(waiting[room:])) * 280
        pending = sum(KV.pages(each.prompt + 1) for each in waiting[room:])
        for stage, member in enumerate(members):
            mine = min(pages, KV.pages(used) // len(members))
            waits = pending if stage == 0 else 0
            self.on(Load(self.at, member, placement.epoch, mine, pages - mine, waits, self.progress))


@pytest.mark.parametrize("members", [2, 4, 5])
@pytest.mark.parametrize(
    ("high", "low", "rate"), [(30.0, 30.0, 2.8), (12.0, 28.0, 3.0), (29.0, 40.0, 4.0), (6.0, 4.0, 4.0)]
)
def test_at_most_one_drop_and_one_restore_in_a_period(members: int, high: float, low: float, rate: float) -> None:
    """`rate`: requests a second for each replica, where 2.5 are served without a drop."""
    loop = Loop(members)
    for _ in range(4):
        before = len(loop.changes)
        loop.run(high, rate * members)
        loop.run(low, 0.1 * members)
        found = [what for _, what in loop.changes[before:]]
        assert found.count("drop") <= 1, loop.changes
        assert found.count("restore") <= 1, loop.changes
    found = [what for _, what in loop.changes]
    assert found[0] == "drop"
    if low >= 28.0:
        assert found == ["drop", "restore"] * 4
