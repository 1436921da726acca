"""A request that has to wait moves to the host and back, or is computed again, by what takes less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ballonet.hooks.batching.pages import RequestPages
from ballonet.hooks.batching.steps import PagePreemption

PAGES = 8


class Preemption(PagePreemption):
    """Says what it does. `page`: seconds to copy a page; `again`: to compute the request again."""

    def __init__(self, page: float | None, again: float | None, room: bool) -> None:
        link = SimpleNamespace(page_seconds=page)
        pages = SimpleNamespace(client=SimpleNamespace(manager=SimpleNamespace(link=link)))
        self.done: list[str] = []
        own = SimpleNamespace(count=lambda name: PAGES, to_host=lambda name: room)
        parts = None if again is None else SimpleNamespace(prefill=lambda tokens, batch: again)
        model = SimpleNamespace(costs=SimpleNamespace(parts=parts))
        cache: Any = SimpleNamespace(pages=pages, request_pages=own, model=model, max_batch_tokens=64)
        scheduler: Any = SimpleNamespace(
            starved_requests=[(SimpleNamespace(request_id="newest", current_len=lambda: 9), 1)],
            active_requests={"oldest": 0, "newest": 0},
            block_new_requests=False,
            memory=SimpleNamespace(now=lambda: SimpleNamespace(usable=0)),
            selection=SimpleNamespace(leaving=frozenset(), needed=len),
        )
        cache.pool = SimpleNamespace(try_to_free_sectors=lambda: None)
        cache.evict_kept = lambda nbytes: False
        self.cache, self.scheduler = cache, scheduler

    def compute_again(self, state: Any) -> None:
        self.done.append("computed again")

    def _keep_for_later(self, state: Any) -> None:
        self.done.append("moved")


@pytest.mark.parametrize(
    ("page", "again", "room", "done"),
    [
        (0.01, 0.17, True, "moved"),
        (0.01, 0.15, True, "computed again"),
        (0.01, 0.17, False, "computed again"),
        (None, 0.15, True, "moved"),
        (0.01, None, True, "moved"),
    ],
)
def test_preempted_request_moves_or_is_computed_again_by_what_takes_less(
    page: float | None, again: float | None, room: bool, done: str
) -> None:
    """Eight pages there and back are sixteen copies."""
    preemption = Preemption(page, again, room)
    assert preemption.offload_requests()
    assert preemption.done == [done]


class Raised:
    """A device whose budget another thread raises between two looks at its free pages."""

    def __init__(self) -> None:
        self.published = [7]
        self.free = iter((PAGES - 2, 4 * PAGES))
        self.taken: list[int] = []

    @property
    def available(self) -> int:
        return next(self.free)

    def take(self, entries: list[int], pages: int) -> int:
        self.taken.append(pages)
        return pages


def test_pages_a_request_lacks_are_looked_up_once() -> None:
    device: Any = Raised()
    restored: list[set[int]] = []
    pages: Any = SimpleNamespace(client=SimpleNamespace(away=lambda pieces: set(range(PAGES)), restore=restored.append))
    RequestPages(device, pages, {}).to_device("newest")
    assert (device.taken, restored) == ([2], [set(range(PAGES))])
