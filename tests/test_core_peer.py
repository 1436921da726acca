"""Pages of the peer: what is taken of KV goes there first, and from there to the host, under everything that looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError

from .core import PAGE, PLACES, Core, behind, holds, make, opened, physical, refused, shim, write
from .faulting import arm, faults_at_every_call

PEER = {"peer": 1, "peer_budget": 3 * PAGE}


class KV:
    """Pages of KV, each full of a byte of its own, with a twin and a spare range."""

    def __init__(self, core: Core, pieces: int = 8) -> None:
        self.core, self.group = core, core.device.group()
        self.range, self.twin, self.spare = (core.range(pieces, "kv", self.group) for _ in range(3))
        self.range.map(0, pieces)
        for piece in range(pieces):
            write(self.range.address + piece * PAGE, piece + 1)

    def entry(self, first: int, count: int) -> _native.Entry:
        return first, self.group, [(self.range, first, count, self.twin, first, [])]

    def places(self) -> str:
        """Where each page is, as the kernel says: d, h or p."""
        return "".join((behind(self.range.address + n * PAGE)[0] or "?")[0] for n in range(self.range.pieces))

    def intact(self) -> None:
        assert all(holds(self.range.address + n * PAGE, n + 1) for n in range(self.range.pieces))
        self.core.device.check()
        numbers = self.core.device.snapshot()
        assert physical() == numbers["created"] * PAGE
        assert physical("host") == numbers["host_pages"] * PAGE
        assert physical("peer") == numbers["peer_pages"] * PAGE <= numbers["peer_budget"]

    def demote(self, first: int, count: int) -> bool:
        """With the bytes in the spare range first."""
        self.spare.map_host(first, count)
        at = first * PAGE
        parts = [(self.spare.address + at, self.twin.address + at, count * PAGE)]
        _native.Transfer(self.core.device).copy(parts, after=0, owner="kv", to="host").wait()
        return self.twin.take_over(first, self.spare, first, count, self.range)


def test_what_fits_in_neither_place_stays() -> None:
    with opened(host_budget=1, peer=1, peer_budget=PAGE) as core:
        kv = KV(core)
        core.device.publish([kv.entry(0, 3), kv.entry(3, 2)])
        assert core.device.take([0]) == 0
        assert core.device.take([3]) == 2
        assert sorted(kv.places()) == sorted("ddddddhp")
        hog = core.range(1)
        refused(lambda: hog.map_host(0, 1))
        refused(lambda: hog.map_peer(0, 1))
        kv.intact()


def test_pages_leave_the_peer_under_what_leads_there_and_what_is_published_stays() -> None:
    with opened(**PEER) as core:
        kv = KV(core)
        core.device.publish([kv.entry(0, 3)])
        core.device.take([0])
        kv.twin.map_host(4, 1)  # clean, and resident
        core.device.publish([kv.entry(4, 1)])
        assert kv.demote(1, 2)
        assert kv.places() == "phhddddd"
        assert [kv.twin.leads_to(n) for n in range(3)] == ["peer", "host", "host"]
        assert kv.spare.backed == 0
        assert core.copied()["kv_p2h"] == 2 * PAGE
        assert core.device.snapshot()["peer_free"] == 2
        assert core.device.published == [4]
        kv.intact()
        write(kv.range.address + PAGE, 2)  # through the alias, which leads to the twin's page
        assert holds(kv.twin.address + PAGE, 2)


def test_a_clean_page_resident_may_be_taken_after_its_twin_has_left_the_peer() -> None:
    with opened(**PEER) as core:
        kv = KV(core)
        kv.twin.map_peer(5, 1)
        _native.Transfer(core.device).copy(
            [(kv.twin.address + 5 * PAGE, kv.range.address + 5 * PAGE, PAGE)], after=0, owner="kv", to="peer"
        ).wait()
        core.device.publish([kv.entry(5, 1)])
        assert kv.demote(5, 1)
        assert kv.places() == "dddddddd"
        assert core.device.take([5]) == 1
        assert kv.places() == "dddddhdd"
        kv.intact()


def test_what_makes_no_sense_is_refused() -> None:
    with opened(**PEER) as core:
        kv, other = KV(core, 4), core.range(4)
        core.device.publish([kv.entry(0, 1)])
        core.device.take([0])
        with pytest.raises(BallonetError, match="no page of its own"):
            kv.twin.take_over(0, kv.spare, 0, 1, kv.range)
        kv.spare.map_host(0, 1)
        with pytest.raises(BallonetError, match="another group"):
            kv.twin.take_over(0, kv.spare, 0, 1, other)
        assert kv.spare.alias(1, kv.twin, 0, 1)
        assert not kv.twin.take_over(0, kv.spare, 0, 1, kv.range), "somebody else leads there"
        kv.intact()
    with opened() as core, pytest.raises(BallonetError, match="no peer"):
        core.range(1).map_peer(0, 1)


def test_a_fault_at_any_call_leaves_every_page_where_it_was_or_goes_on_with_the_host() -> None:
    def published(core: Core) -> KV:
        kv = KV(core)
        core.device.publish([kv.entry(0, 2), kv.entry(2, 3)])
        return kv

    def taken(core: Core) -> KV:
        kv = published(core)
        assert core.device.take([0])
        return kv

    for kv, done in faults_at_every_call(
        published, lambda kv: all(kv.core.device.take([key]) for key in (0, 2)), **PEER
    ):
        kv.intact()
        assert done or all(kv.core.device.take([key]) for key in kv.core.device.published), "the host had none, once"
        kv.intact()
    for kv, _ in faults_at_every_call(taken, lambda kv: kv.demote(0, 2), **PEER):
        kv.intact()


def test_a_driver_without_memory_there_means_the_host() -> None:
    with opened(**PEER) as core:
        kv = KV(core)
        core.device.publish([kv.entry(0, 2)])
        arm("cuMemCreate")
        assert core.device.take([0]) == 2
        assert set(kv.places()[:2]) <= {"h", "p"}
        assert "h" in kv.places()
        kv.intact()


def test_a_second_pool_is_labelled_so_and_has_a_budget_of_its_own() -> None:
    with opened(budget=8, peer=0, peer_budget=3 * PAGE) as core:
        kv = KV(core)  # all of the device's budget
        core.device.publish([kv.entry(0, 5)])
        assert core.device.take([0]) == 5
        numbers = core.device.snapshot()
        assert (numbers["peer"], core.device.peer, numbers["peer_pages"]) == ("second pool", 0, 3)
        assert kv.places() == "dddhhddd"
        assert [kv.range.place(n) for n in range(5)] == ["peer", "peer", "peer", "host", "host"]
        assert physical() == (numbers["created"] + 3) * PAGE
        assert physical("peer") == 0
        assert all(holds(kv.range.address + n * PAGE, n + 1) for n in range(8))


REFUSING = "int cuDeviceCanAccessPeer(int* can, int device, int peer) { *can = 0; return 0; }"


@pytest.mark.parametrize(("peer", "why"), [(1, "cannot reach"), (7, "does not exist")])
def test_a_peer_that_cannot_be_reached_is_none(tmp_path: Path, peer: int, why: str) -> None:
    path = shim(tmp_path, REFUSING) if peer == 1 else None
    device = make(peer=peer, peer_budget=4 * PAGE, path=path)
    assert device.peer is None
    assert why in device.peer_refused
    assert device.snapshot()["peer_budget"] == 0
    device.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuDeviceCanAccessPeer"])
def test_a_peer_that_does_not_work_is_none(call: str) -> None:
    made = make(**PEER)
    made.close()
    arm(call, 1 if call == "cuDeviceCanAccessPeer" else 3)  # host pages are tried first, with two
    device = make(**PEER)
    assert device.peer is None
    assert call in device.peer_refused
    device.check()
    device.close()
    assert not any(map(physical, PLACES))
