"""What a driver says it can do is tried when a device is opened, and what it refuses is done without."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest

from ballonet.allocator import device_choice
from ballonet.allocator.config import Config
from ballonet.allocator.errors import ManageError, PoolExhausted
from ballonet.hooks.weights import ranges

from .core import PAGE, make, opened, physical, shim
from .faulting import arm, disarm

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


def test_what_needs_host_pages_says_why_there_are_none(tmp_path: Path) -> None:
    with opened(budget=2, spill=True, path=shim(tmp_path, HEAD + NO_CREATE)) as core:
        with pytest.raises(PoolExhausted, match=r"Nor can it lie on the host.*creating a page of host memory"):
            core.device.allocate(3 * PAGE)
        with pytest.raises(ManageError, match=r"cannot stream .*creating a page of host memory.*from_pretrained"):
            ranges.check_host(core.device, 1)


def test_a_program_is_told_once_that_there_are_no_host_pages(tmp_path: Path) -> None:
    settings = Config(device="cpu", page_size=PAGE, budget=16 * PAGE, host_budget=4 * PAGE)
    named = dataclasses.replace(settings, device="cuda", libcuda=shim(tmp_path, HEAD + NO_CREATE))
    with pytest.warns(RuntimeWarning, match=r"without host pages: cuMemCreate .*get_mempolicy"):
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
