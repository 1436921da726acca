"""Ranges whose pieces belong to the tensors over them: a piece is retired with the last of its tensors."""

from __future__ import annotations

from ballonet.allocator import _native

from .core import PAGE, Core, behind, opened, physical
from .test_core_ranges import tensor


def reserved(core: Core, pieces: int, group: _native.Group | None = None) -> _native.Range:
    return core.range(pieces, "weights", group, auto_retire=True)


def test_a_piece_goes_with_its_last_tensor_and_the_others_stay() -> None:
    with opened() as core:
        some = reserved(core, 4)
        some.map(0, 4)
        first, second = tensor(some, 0, 2), tensor(some, 1, 2)
        assert some.backed == 4
        del first
        core.device.reap(wait=True)
        assert [some.backing(piece) for piece in range(4)] == ["none", "device", "device", "device"]
        assert some.backed == 3
        assert behind(some.address)[:2] == (None, "---p")
        assert physical() == 4 * PAGE  # it is free
        assert core.pages()["weights"] == 3
        del second
        assert (some.backed, some.backing(3)) == (1, "device")  # nobody ever looked at the last one
        some.close()
        core.device.reap(wait=True)
        assert core.pages()["weights"] == 0


def test_a_group_counts_the_tensors_that_went() -> None:
    with opened() as core:
        group, other = core.device.group(), core.device.group()
        one, two, else_ = reserved(core, 1, group), core.range(2, "weights", group), reserved(core, 1, other)
        for each in (one, two, else_):
            each.map(0, 1)
        views = [tensor(one, 0), tensor(one, 0), tensor(two, 0), tensor(else_, 0)]
        assert (group.unpinned, other.unpinned) == (0, 0)
        del views[:3]
        assert (group.unpinned, other.unpinned) == (3, 0)
        del views
        assert other.unpinned == 1


def test_use_is_noted_of_what_is_backed_and_of_nothing_else() -> None:
    with opened() as core:
        some = core.range(6, "weights")
        some.note_use(0, False)  # nothing is there yet
        some.map(1, 2)
        some.map(5, 1)
        lane = core.stream()
        some.note_use(lane, True)
        core.occupy(lane, 0.05)
        some.retire(2, 1)
        some.note_use(lane, False)  # what is retiring is used by no one
        core.device.synchronize()
        core.device.reap(wait=True)
        assert [some.backing(piece) for piece in range(6)] == ["none", "device", "none", "none", "none", "device"]
