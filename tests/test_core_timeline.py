"""Who owned how many pages, and when: the journal and the peaks."""

from __future__ import annotations

import time

from .core import PAGE, Core, opened


def pause() -> None:
    """Longer than the journal's resolution: what follows is a sample of its own."""
    time.sleep(0.001)


def newest(core: Core) -> tuple[int, ...]:
    pages = core.pages()
    return tuple(pages[owner] for owner in ("free", "weights", "activations", "kv", "retiring"))


def test_every_change_of_owners_is_a_sample() -> None:
    with opened() as core:
        assert core.device.timeline() == []
        begin, seen, blocks = time.monotonic_ns(), [], []
        kv, weights = core.range(4, "kv"), core.range(3, "weights")

        def retire() -> None:
            kv.retire(1, 2)
            core.device.reap(wait=True)  # or a thread of the core's does so, a moment later

        for step in (
            lambda: kv.map(0, 4),
            lambda: weights.map(0, 3),
            lambda: blocks.append(core.device.allocate(2 * PAGE)),
            retire,
            core.device.trim,
        ):
            pause()
            step()
            seen.append(newest(core))
        rows = core.device.timeline()
        times = [row[0] for row in rows]
        assert times == sorted(set(times))
        assert begin <= times[0] <= times[-1] <= time.monotonic_ns()
        assert [row[1:] for row in rows if row[1:] in seen] == seen
        assert seen == [(0, 0, 0, 4, 0), (0, 3, 0, 4, 0), (0, 3, 2, 4, 0), (2, 3, 2, 2, 0), (0, 3, 2, 2, 0)]
        assert core.device.timeline() == []
        core.device.deallocate(blocks[0])


def test_a_burst_is_one_sample_or_few_and_ends_with_the_truth() -> None:
    with opened(budget=600) as core:
        some = core.range(512)
        begin = time.monotonic_ns()
        for piece in range(512):
            some.map(piece, 1)
        took = time.monotonic_ns() - begin
        rows = core.device.timeline()
        assert len(rows) <= took // 50_000 + 2
        assert rows[-1][1:] == newest(core) == (0, 0, 0, 512, 0)


def test_the_peak_is_of_what_existed_and_can_be_reset() -> None:
    with opened() as core:
        some = core.range(20)
        some.map(0, 20)
        some.retire(5, 15)
        core.device.reap(wait=True)
        core.device.trim()
        assert core.created() == 5
        assert core.device.snapshot()["physical_peak"] == 20 * PAGE
        core.device.reset_peaks()
        assert core.device.snapshot()["physical_peak"] == 5 * PAGE
