"""The companion: compiled once, kept, shared by processes, and what torch's CUDA allocator would call in it."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ballonet.allocator import _native, companion, cuda_headers, devices, torch_parts
from ballonet.allocator.companion import Companion
from ballonet.allocator.errors import CompanionUnavailable, InstallError
from ballonet.allocator.install import install, restore
from ballonet.allocator.pluggable import HOOKS
from ballonet.allocator.torch_parts import COMPANION, TORCH_ALLOCATOR, TorchBuild, TorchPart
from ballonet.allocator.trusted import TrustedFolder

from .faulting import arm

pytestmark = pytest.mark.skipif(
    torch_parts.compiler() is None, reason="no C++ compiler: the companion cannot be built here"
)

# Calls the companion as torch does: with a std::function by value, and catching what is thrown.
PROBE = r"""
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
using Filter = std::function<bool(struct CUstream_st*)>;
using PoolId = std::pair<unsigned long long, unsigned long long>;
static char text[4096];
static int code = 0;
static std::weak_ptr<int> held;
template <class Call> static int caught(Call call) {
  std::strcpy(text, "");
  try { call(); return 0; }
  catch (const c10::OutOfMemoryError& e) { std::strncpy(text, e.what_without_backtrace(), sizeof text - 1); return 1; }
  catch (const c10::AcceleratorError& e) {
    std::strncpy(text, e.what_without_backtrace(), sizeof text - 1);
    code = e.get_error_code();
    return 4;
  }
  catch (const c10::Error& e) { std::strncpy(text, e.what_without_backtrace(), sizeof text - 1); return 2; }
  catch (const std::exception& e) { std::strncpy(text, e.what(), sizeof text - 1); return 3; }
}
struct Other final : c10::Allocator {  // another library's, over the one that was there
  c10::Allocator* below = nullptr;
  c10::DataPtr allocate(size_t size) override { return below->allocate(size); }
  c10::DeleterFnPtr raw_deleter() const override { return below->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
static Other other;
extern "C" bool stock_in_place() { return c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator(); }
extern "C" void displace() { other.below = c10::GetCPUAllocator(); c10::SetCPUAllocator(&other); }
extern "C" void give_way() { c10::SetCPUAllocator(other.below); }
extern "C" const char* message() { return text; }
extern "C" int error_code() { return code; }
extern "C" bool filter_alive() { return !held.expired(); }
extern "C" int allocate(void* (*f)(size_t, int, void*), size_t size, int device, void* stream, void** out) {
  return caught([&] { *out = f(size, device, stream); });
}
extern "C" int begin(void (*f)(int, PoolId, Filter), unsigned long long id, void* stream, bool raises) {
  auto token = std::make_shared<int>(0);
  const int code = caught([&] {
    f(0, {0, id}, [token, stream, raises](struct CUstream_st* asked) {
      if (raises) throw std::runtime_error("the filter failed");
      return asked == stream;
    });
  });
  if (code == 0) held = token;
  return code;
}
extern "C" void end(void (*f)(int, PoolId), unsigned long long id) { f(0, {0, id}); }
extern "C" int fraction(void (*f)(double, int), double value) { return caught([&] { f(value, 0); }); }
extern "C" int base(void* (*f)(void*, size_t*), void* block) { size_t n; return caught([&] { f(block, &n); }); }
"""


def built(folder: Path, part: TorchPart = COMPANION) -> Path:
    """Where the part lies in the folder, after it was compiled if need be."""
    return companion.build(TrustedFolder(folder), part).path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the companion in it."""
    folder = tmp_path_factory.mktemp("cache")
    built(folder)
    return folder


@pytest.fixture
def quick(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What compiles takes what was compiled before. Returns that."""
    compiled = built(cache)
    monkeypatch.setattr(companion, "compile_part", lambda part, build, output, begin: shutil.copy(compiled, output))
    return compiled


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("probe")
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text(PROBE)
    options = ["-std=c++17", *torch_parts.options_for(companion.this_torch()), "-fvisibility=default"]
    subprocess.run([str(torch_parts.compiler()), *options, str(source), "-lc10", "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.message.restype = ctypes.c_char_p
    loaded.filter_alive.restype = ctypes.c_bool
    loaded.stock_in_place.restype = ctypes.c_bool
    return loaded


@pytest.fixture
def loaded(cache: Path) -> Iterator[Companion]:
    """The companion over a device of 4 MiB, which it allocates from."""
    install(budget="4MiB", page_size="64KiB", device="cpu")
    yield companion.load(cache, _native.core_table(), 0)
    restore()
    assert devices.current() is None


def _pointer(loaded: Companion, function: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(loaded.address(function))


def _plain(function: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(_native.entry_points()[function])


def test_companion_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_again(part: TorchPart, *arguments: object) -> None:
        raise AssertionError(f"{part.name} was compiled again")

    monkeypatch.setattr(companion, "compile_part", compile_again)
    path = built(cache)
    assert path.is_file()
    assert list(cache.iterdir()) == [path]


def test_the_name_follows_what_a_part_has_to_fit_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TorchBuild(Path("torch"), "2.13.0+cpu", "cf30153c", None)
    name = torch_parts.file_name(COMPANION, build)
    assert name.startswith("companion-torch2.13.0-")
    others = [TORCH_ALLOCATOR]
    for changed in COMPANION.sources:
        copy = Path(shutil.copy(changed, tmp_path))
        copy.write_text(f"{copy.read_text()}// one more line\n")
        sources = tuple(copy if source == changed else source for source in COMPANION.sources)
        others.append(dataclasses.replace(COMPANION, sources=sources))
    names = {torch_parts.file_name(part, build) for part in others}
    for field, value in {"version": "2.13.1", "commit": "another", "cxx11_abi": False}.items():
        names.add(torch_parts.file_name(COMPANION, dataclasses.replace(build, **{field: value})))
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "another")
        names.add(torch_parts.file_name(COMPANION, build))
    assert len({name, *names}) == 8
    on_cuda = dataclasses.replace(build, folder=Path("elsewhere"), version="2.13.0+cu130", cuda="13.0")
    monkeypatch.setattr(torch_parts, "COMPILERS", ("another-compiler",))
    monkeypatch.setattr("platform.libc_ver", lambda: ("another", "1.0"))
    assert torch_parts.file_name(COMPANION, on_cuda) == name


@pytest.mark.usefixtures("quick")
def test_two_who_compile_it_at_once_have_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, compiles = threading.Barrier(2, timeout=600), companion.compile_part
    monkeypatch.setattr(companion, "compile_part", lambda *given: (compiles(*given), both.wait()))
    with ThreadPoolExecutor(2) as threads:
        paths = {*threads.map(built, [tmp_path] * 2)}
    assert paths == {*tmp_path.iterdir()}
    assert len(paths) == 1


def test_a_damaged_file_is_replaced(tmp_path: Path, quick: Path) -> None:
    damaged = tmp_path / quick.name
    damaged.write_bytes(b"not a library")
    loaded = companion.load(tmp_path, _native.core_table(), 0)
    assert loaded.path != damaged
    assert not damaged.exists()
    assert companion.load(tmp_path, _native.core_table(), 0).path == damaged


@pytest.mark.usefixtures("quick")
def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    loaded = companion.load(occupied / "cache", _native.core_table(), 0)
    assert loaded.path.is_file()
    assert tmp_path not in loaded.path.parents


def test_without_a_compiler_what_was_compiled_before_is_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built(cache)
    monkeypatch.setattr(torch_parts, "COMPILERS", ("no-such-compiler",))
    assert built(cache) == path
    with pytest.raises(CompanionUnavailable, match="no-such-compiler"):
        companion.load(tmp_path, _native.core_table(), 0)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'no headers here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(torch_parts, "COMPILERS", (str(compiler),))
    folder = tmp_path / "cache"
    with pytest.raises(CompanionUnavailable, match="no headers here"):
        companion.load(folder, _native.core_table(), 0)
    assert list(folder.iterdir()) == []


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of that with what a wheel brings, with nothing in it yet."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(companion, "PREBUILT", folder)
    return folder


def test_the_part_that_a_wheel_brought_for_this_torch_needs_no_compiler(
    cache: Path, brought: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(built(cache), brought)
    monkeypatch.setattr(torch_parts, "COMPILERS", ("no-such-compiler",))
    loaded = companion.load(tmp_path / "cache", _native.core_table(), 0)
    assert loaded.path == brought / built(cache).name
    assert not (tmp_path / "cache").exists()


def test_an_unknown_torch_is_compiled_for_and_one_line_says_so(
    quick: Path, brought: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in ("2.11.0", "2.12.0"):
        other = dataclasses.replace(companion.this_torch(), version=f"{release}+cpu")
        shutil.copy(quick, brought / torch_parts.file_name(COMPANION, other))

    def compile_part(part: TorchPart, build: TorchBuild, output: Path, begin: Callable[[], None]) -> None:
        begin()
        shutil.copy(quick, output)

    monkeypatch.setattr(companion, "compile_part", compile_part)
    for part in (COMPANION, TORCH_ALLOCATOR, COMPANION):
        assert built(tmp_path / "cache", part).parent == tmp_path / "cache"
    assert capsys.readouterr().err == (
        f"ballonet: compiling the companion for torch {torch.__version__} once, into {tmp_path / 'cache'}: this wheel "
        "brings it for 2.11.0, 2.12.0\n"
    )


def test_a_part_that_cannot_be_loaded_is_compiled_instead(quick: Path, brought: Path, tmp_path: Path) -> None:
    (brought / quick.name).write_bytes(b"made for another C library")
    loaded = companion.load(tmp_path / "cache", _native.core_table(), 0)
    assert loaded.path == tmp_path / "cache" / quick.name


def test_the_installed_torch_is_read_from_its_files() -> None:
    assert torch_parts.installed_build() == companion.this_torch()
    assert torch_parts.read_build(Path(__file__).parent) is None


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without CUDA's headers. Returns an empty folder."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(cuda_headers, "TOOLKIT", tmp_path / "usr" / "local" / "cuda")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def headers_in(folder: Path, version: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return folder


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("packages/nvidia/cu13/include", "path"),
        ("packages/nvidia/cuda_runtime/include", "path"),
        ("packages/triton/backends/nvidia/include", "path"),
        ("toolkit/include", "CUDA_HOME"),
        ("usr/local/cuda/include", ""),
    ],
)
def test_cuda_headers_are_found(nowhere: Path, monkeypatch: pytest.MonkeyPatch, where: str, named: str) -> None:
    there = headers_in(nowhere / where, 13000)
    if named == "path":
        monkeypatch.setattr(sys, "path", [str(nowhere / "packages")])
    elif named:
        monkeypatch.setenv(named, str(nowhere / "toolkit"))
    assert cuda_headers.find("13.0") == (there, "")


def test_cuda_headers_of_another_version_are_not_taken(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(nowhere / "packages")])
    other = headers_in(nowhere / "packages/nvidia/cuda_runtime/include", 12080)
    right = headers_in(nowhere / "usr/local/cuda/include", 13020)
    last = headers_in(nowhere / "packages/triton/backends/nvidia/include", 13000)
    assert cuda_headers.find("13.0") == (right, "")
    assert cuda_headers.find("12.8") == (other, "")
    shutil.rmtree(right)
    assert cuda_headers.find("13.0") == (last, "")
    shutil.rmtree(last)
    assert cuda_headers.find("13.0") == (
        None,
        f"the headers of CUDA 13 (cuda_runtime_api.h) are missing ({other} has those of CUDA 12): pip install "
        "'nvidia-cuda-runtime==13.*', or set CUDA_HOME to a toolkit of that version",
    )


def test_a_core_of_another_version_is_refused(cache: Path) -> None:
    table = (ctypes.c_uint64 * 16)(999)
    with pytest.raises(CompanionUnavailable, match="different versions"):
        Companion(companion.build(TrustedFolder(cache)), ctypes.addressof(table), 0)


def test_torchs_own_cpu_allocator_is_put_back(probe: ctypes.CDLL) -> None:
    assert probe.stock_in_place()
    install(budget="4MiB", page_size="64KiB", device="cpu")
    assert not probe.stock_in_place()
    tensor = torch.ones(10)
    restore()
    assert not probe.stock_in_place()  # a block of the pool lives
    del tensor
    restore()
    assert probe.stock_in_place()


def test_another_librarys_cpu_allocator_is_left_alone(probe: ctypes.CDLL) -> None:
    install(budget="4MiB", page_size="64KiB", device="cpu")
    probe.displace()
    restore()
    assert torch.ones(10).sum() == 10
    with pytest.raises(InstallError, match="another library"):
        install(budget="4MiB", page_size="64KiB", device="cpu")
    assert torch.ones(10).sum() == 10
    probe.give_way()
    install(budget="4MiB", page_size="64KiB", device="cpu")
    restore()
    assert probe.stock_in_place()


def test_every_hook_has_its_function() -> None:
    functions = _native.entry_points()
    assert set(functions) == {"alloc", "segment", "free", *HOOKS.values()}
    assert len(set(functions.values())) == len(functions)
    assert 0 not in functions.values()


def test_cuda_entry_points_allocate_and_free(loaded: Companion, probe: ctypes.CDLL) -> None:
    alloc, free = _pointer(loaded, "ballonet_cuda_alloc"), _plain("free")
    block = ctypes.c_void_p()
    assert probe.allocate(alloc, ctypes.c_size_t(1000), 0, None, ctypes.byref(block)) == 0
    device = devices.require()
    assert block.value is not None
    assert device.block_size(block.value) >= 1000
    ctypes.memset(block, 7, 1000)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(free.value)(
        block, 1000, 0, None
    )
    assert device.block_size(block.value) == 0
    assert probe.allocate(alloc, ctypes.c_size_t(0), 0, None, ctypes.byref(block)) == 0
    assert block.value is None


def test_cuda_out_of_memory_is_torchs_own_error(loaded: Companion, probe: ctypes.CDLL) -> None:
    alloc, block = _pointer(loaded, "ballonet_cuda_alloc"), ctypes.c_void_p()
    assert probe.allocate(alloc, ctypes.c_size_t(2**30), 0, None, ctypes.byref(block)) == 1
    assert b"set_budget" in probe.message()
    # Torch's own words, by which programs know it: accelerate's `should_reduce_batch_size` looks for " out of memory.".
    assert probe.message().startswith(b"CPU out of memory. Tried to allocate 1.00 GiB. ballonet: ")
    assert probe.allocate(alloc, ctypes.c_size_t(1000), 63, None, ctypes.byref(block)) == 2
    assert b"install" in probe.message()


def test_cuda_errors_that_last_are_no_want_of_memory(loaded: Companion, probe: ctypes.CDLL) -> None:
    alloc, block = _pointer(loaded, "ballonet_cuda_alloc"), ctypes.c_void_p()
    for code in (4, 700, 719, 999):
        arm(f"cuMemCreate={code}")
        assert probe.allocate(alloc, ctypes.c_size_t(2**20), 0, None, ctypes.byref(block)) == 4
        assert probe.error_code() == code
        assert b"not for want of memory" in probe.message()
        assert b"out of memory" not in probe.message()
        assert b"new process" in probe.message()
    device = devices.require()
    assert device.snapshot()["heap"]["live"] == 0
    device.check()
    assert probe.allocate(alloc, ctypes.c_size_t(2**20), 0, None, ctypes.byref(block)) == 0
    assert block.value is not None
    device.deallocate(block.value)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_stream_filter_decides_and_is_dropped_at_the_end(
    loaded: Companion, probe: ctypes.CDLL, compiled: bool
) -> None:
    """What a graph's capture allocates keeps its addresses until the graph is gone, with or without a compiler at run
    time: else a replay would write into tensors that came later."""
    begin, end, release = _plain("begin_pool"), _plain("end_pool"), _plain("release_pool")
    alloc = _pointer(loaded, "ballonet_cuda_alloc") if compiled else _plain("alloc")
    number, device = ctypes.c_ulonglong(5), devices.require()

    def allocate() -> int:
        block = ctypes.c_void_p()
        assert probe.allocate(alloc, ctypes.c_size_t(512), 0, None, ctypes.byref(block)) == 0
        assert block.value is not None
        return block.value

    assert probe.begin(begin, number, None, ctypes.c_bool(False)) == 0
    assert probe.filter_alive()
    assert probe.begin(begin, number, None, ctypes.c_bool(False)) == 3
    assert b"being filled" in probe.message()
    captured = allocate()
    device.deallocate(captured)
    assert allocate() == captured  # within its pool
    device.deallocate(captured)
    probe.end(end, number)
    assert not probe.filter_alive()
    later = [allocate() for _ in range(20)]
    assert captured not in later
    probe.end(release, number)
    for block in later:
        device.deallocate(block)


def test_an_error_of_the_stream_filter_reaches_torch(loaded: Companion, probe: ctypes.CDLL) -> None:
    alloc, block = _pointer(loaded, "ballonet_cuda_alloc"), ctypes.c_void_p()
    number = ctypes.c_ulonglong(6)
    live = devices.require().snapshot()["heap"]["live"]
    assert probe.begin(_plain("begin_pool"), number, None, ctypes.c_bool(True)) == 0
    assert probe.allocate(alloc, ctypes.c_size_t(512), 0, None, ctypes.byref(block)) == 2
    assert probe.message() == b"the filter failed"
    probe.end(_plain("end_pool"), number)
    assert devices.require().snapshot()["heap"]["live"] == live
    assert probe.allocate(alloc, ctypes.c_size_t(512), 0, None, ctypes.byref(block)) == 0
    assert block.value is not None
    devices.require().deallocate(block.value)
    probe.end(_plain("release_pool"), number)


def test_calls_without_a_meaning_here_are_refused(loaded: Companion, probe: ctypes.CDLL) -> None:
    fraction = _plain("memory_fraction")
    assert probe.fraction(fraction, ctypes.c_double(0.5)) == 3
    assert b"set_budget" in probe.message()
    assert probe.fraction(fraction, ctypes.c_double(1.0)) == 0
    assert probe.base(_plain("base_allocation"), None) == 3
    assert b"cudaIpc" in probe.message()
