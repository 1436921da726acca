"""What a driver says it can do is tried when a device is opened, and what it refuses is done without."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest

from ballonet.allocator import _native, device_choice
from ballonet.allocator.config import Config
from ballonet.allocator.errors import BallonetError, ManageError, PoolExhausted
from ballonet.hooks.weights import ranges

from .core import PAGE, PLACES, Core, behind, holds, make, opened, physical, shim, write
from .faulting import arm, disarm, faults_at_every_call

HEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
struct prop { int type, handles, location, id; void* win32; unsigned char compression, rdma; };
#define NEXT(name, type) ((type)dlsym(RTLD_NEXT, #name))
typedef int (*Create)(void*, unsigned long, struct prop*, unsigned long long);
"""
# Each stands for a machine: how it refuses host pages although its attribute says that it has them.
NO_CREATE = """
int cuMemCreate(void* handle, unsigned long size, struct prop* place, unsigned long long flags) {
  return place->location == 3 ? 800 : NEXT(cuMemCreate, Create)(handle, size, place, flags);
}
"""
NO_ACCESS = """
typedef int (*Access)(unsigned long long, unsigned long, void*, unsigned long);
static unsigned long long host;
int cuMemCreate(unsigned long long* handle, unsigned long size, struct prop* place, unsigned long long flags) {
  int result = NEXT(cuMemCreate, Create)(handle, size, place, flags);
  if (place->location == 3) host = *handle;
  return result;
}
typedef int (*Map)(unsigned long long, unsigned long, unsigned long, unsigned long long, unsigned long long);
static unsigned long long at;
int cuMemMap(unsigned long long address, unsigned long size, unsigned long offset, unsigned long long handle,
             unsigned long long flags) {
  if (handle == host) at = address;
  return NEXT(cuMemMap, Map)(address, size, offset, handle, flags);
}
int cuMemSetAccess(unsigned long long address, unsigned long size, void* access, unsigned long count) {
  return address == at ? 304 : NEXT(cuMemSetAccess, Access)(address, size, access, count);
}
"""
NO_COPY = """
int cuMemcpyAsync(unsigned long long to, unsigned long long from, unsigned long size, void* stream) { return 1; }
"""
OTHER_BYTES = """
int cuMemcpyAsync(unsigned long long to, unsigned long long from, unsigned long size, void* stream) { return 0; }
"""
GRANULARITY = """
typedef int (*Ask)(unsigned long*, struct prop*, int);
int cuMemGetAllocationGranularity(unsigned long* granularity, struct prop* place, int option) {
  int result = NEXT(cuMemGetAllocationGranularity, Ask)(granularity, place, option);
  if (place->location == 3) *granularity = 1 << 24;
  return result;
}
"""


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (NO_CREATE, "creating a page of host memory"),
        (NO_ACCESS, "opening"),
        (NO_COPY, "copying to a page of host memory"),
        (OTHER_BYTES, "other bytes"),
        (GRANULARITY, r"multiples of 16.00 MiB"),
    ],
    ids=["create", "access", "copy", "bytes", "granularity"],
)
def test_host_pages_that_do_not_work_are_none(machine: str, why: str, tmp_path: Path) -> None:
    with opened(path=shim(tmp_path, HEAD + machine)) as core:
        assert not core.device.host_pages
        some = core.range(1)
        with pytest.raises(PoolExhausted, match=f"no host pages.*{why}"):
            some.map_host(0, 1)
        some.map(0, 1)
        assert not some.move(0, "host")


def test_calls_that_need_host_pages_say_why_there_are_none(tmp_path: Path) -> None:
    with opened(budget=2, spill=True, path=shim(tmp_path, HEAD + NO_CREATE)) as core:
        with pytest.raises(PoolExhausted, match=r"Nor can it lie on the host.*creating a page of host memory"):
            core.device.allocate(3 * PAGE)
        with pytest.raises(ManageError, match=r"cannot stream .*creating a page of host memory.*from_pretrained"):
            ranges.check_host(core.device, 1)


def test_a_program_is_told_once_that_there_are_no_host_pages(tmp_path: Path) -> None:
    settings = Config(device="cpu", page_size=PAGE, budget=16 * PAGE, host_budget=4 * PAGE)
    named = dataclasses.replace(settings, device="cuda", libcuda=shim(tmp_path, HEAD + NO_CREATE))
    with pytest.warns(RuntimeWarning, match=r"no host pages: cuMemCreate .*get_mempolicy"):
        device = device_choice.open_device(named)
    device.close()


def test_a_full_device_says_nothing_of_host_pages(tmp_path: Path) -> None:
    full = """
    int cuMemCreate(void* handle, unsigned long size, struct prop* place, unsigned long long flags) {
      return place->location == 1 ? 2 : NEXT(cuMemCreate, Create)(handle, size, place, flags);
    }
    """
    with opened(path=shim(tmp_path, HEAD + full)) as core:
        assert core.device.host_pages
        some = core.range(1)
        some.map_host(0, 1)


RDMA = """
static int wanted[4], refuse;
void set_refuse(int now) { refuse = now; }
int asked(int location) { return wanted[location]; }
typedef int (*Attribute)(int*, int, int);
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = 1;
  return attribute == 110 ? 0 : NEXT(cuDeviceGetAttribute, Attribute)(value, attribute, device);
}
int cuMemCreate(void* handle, unsigned long size, struct prop* place, unsigned long long flags) {
  if (refuse && place->rdma) return 801;
  wanted[place->location] = place->rdma;
  return NEXT(cuMemCreate, Create)(handle, size, place, flags);
}
"""


@pytest.mark.parametrize("refused", [0, 1])
def test_network_cards_reach_device_pages_where_the_driver_has_it(refused: int, tmp_path: Path) -> None:
    path = shim(tmp_path, HEAD + RDMA)
    driver = ctypes.CDLL(path)
    with opened(path=path) as core:
        driver.set_refuse(refused)
        core.range(2).map(0, 2)
        core.range(1).map_host(0, 1)
        assert driver.asked(1) == 1 - refused
        assert driver.asked(3) == 0


@pytest.mark.parametrize(("copies", "waits"), [((), 1), ((), 2), ((), 3), ((), 5), ((1,), 1), ((2,), 1)])
def test_a_new_device_whose_copies_or_waits_fail_keeps_no_page(copies: tuple[int, ...], waits: int) -> None:
    """What is copied to try host pages is waited for until the driver has waited: else the page could not go."""
    for ahead in copies:
        arm("cuMemcpyAsync", ahead)
    for ahead in range(1, waits + 1):
        arm("cuStreamSynchronize", ahead)
    device = make(host_budget=8)
    assert device.host_pages or not copies
    device.check()
    device.close()
    disarm()
    assert not any(map(physical, ("device", "host")))


# -- pages of the peer: what is taken of KV goes there first, and from there to the host


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


def test_peer_calls_that_make_no_sense_are_refused() -> None:
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
