"""The companion: the parts of ballonet that link torch. Compiled for the torch found here, kept, and loaded.

There are two. `Companion` links libc10 alone and raises torch's errors. `TorchAllocator` is a CUDA allocator with all
of torch's contract; it links torch's CUDA libraries and needs CUDA's headers, which pip's torch brings.

Note [Where the compiled companion is kept]
    The core is built once for every torch; this part is not, because it throws and subclasses torch's C++ types. It is
    compiled at the first `install()` (about a second) into the user's cache folder. Its name holds what decides whether
    it fits: torch and its C++ ABI, our sources, the C library, and which compiler made it. It does not use Python's
    interface, so that one file serves every Python. It is compiled under another name and moved into place, so that two
    processes may do it at once and none sees half a file. Where the folder cannot be written to, or code in it cannot
    be run, a temporary folder of this process takes its place. Where there is no compiler, a file that an earlier run
    with one left behind is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch

from . import cuda_headers
from .defaults import COMPILE
from .errors import CompanionUnavailable

CSRC: Final = Path(__file__).parent / "csrc"
COMPILERS: Final = ("c++", "g++", "clang++")
STANDARDS: Final = ("c++17", "c++20")  # the first that torch's headers accept
T = TypeVar("T")


@dataclass(frozen=True)
class CompanionPart:
    """One file to compile: `sources`, of which the first is compiled, and the libraries of torch that it links."""

    name: str
    sources: tuple[Path, ...]
    libraries: tuple[str, ...]
    needs_cuda: bool = False


COMPANION: Final = CompanionPart("companion", (CSRC / "torch" / "companion.cpp", CSRC / "torch" / "entry.h"), ("c10",))
TORCH_ALLOCATOR: Final = CompanionPart(
    "torch-allocator",
    (
        CSRC / "torch" / "cuda_allocator.cpp",
        CSRC / "torch" / "history.h",
        CSRC / "torch" / "report.h",
        CSRC / "torch" / "crt" / "host_config.h",
        CSRC / "torch" / "crt" / "host_defines.h",
        CSRC / "torch" / "entry.h",
    ),
    ("torch_cuda", "torch_cpu", "c10_cuda", "c10"),
    needs_cuda=True,
)


class Companion:
    """The loaded library. `core_table` is the address of a `BallonetCore` (entry.h), `ordinal` that of its device."""

    def __init__(self, path: Path, core_table: int, ordinal: int) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        initialize = self._library.ballonet_companion_init
        initialize.argtypes, initialize.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_bool
        self._library.ballonet_cpu_install.restype = ctypes.c_bool
        self._library.ballonet_cpu_restore.restype = ctypes.c_bool
        if not initialize(core_table, ordinal):
            raise CompanionUnavailable(
                f"{path} and the native core are of different versions of ballonet: build the core again "
                "(pip install, or make build)"
            )

    def address(self, function: str) -> int:
        """Returns the address of one of the functions that torch calls (`ballonet_cuda_…`)."""
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value
        assert address is not None
        return address

    def install_cpu(self) -> bool:
        """Makes torch's CPU memory come from the core. False where another allocator has displaced this one."""
        return bool(self._library.ballonet_cpu_install())

    def pause_cpu(self) -> None:
        """Makes new CPU memory come from torch's own allocator; live blocks are still freed to the core."""
        self._library.ballonet_cpu_pause()

    def restore_cpu(self) -> bool:
        """Puts torch's own CPU allocator back; nothing of the core may live. False where another displaced it."""
        return bool(self._library.ballonet_cpu_restore())

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """A context in which this thread's CPU memory comes from torch's own allocator."""
        self._library.ballonet_cpu_stock_begin()
        try:
            yield
        finally:
            self._library.ballonet_cpu_stock_end()


class TorchAllocator:
    """The loaded CUDA allocator. Parameters as of `Companion`."""

    def __init__(self, path: Path, core_table: int, ordinal: int) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        initialize, self._place = self._library.ballonet_torch_init, self._library.ballonet_torch_place
        initialize.argtypes, initialize.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_bool
        self._place.restype = ctypes.c_bool
        if not initialize(core_table, ordinal):
            raise CompanionUnavailable(f"{path} and the native core are of different versions of ballonet")

    def place(self) -> bool:
        """Makes it torch's CUDA allocator. False where torch has used another."""
        return bool(self._place())


def load(cache: Path, core_table: int, ordinal: int) -> Companion:
    """Returns the companion for the torch of this process, compiled into `cache` where it is missing.
    CompanionUnavailable."""
    return _load(COMPANION, cache, lambda path: Companion(path, core_table, ordinal))


def load_allocator(cache: Path, core_table: int, ordinal: int) -> TorchAllocator:
    """Returns the allocator for the torch of this process, compiled into `cache` where it is missing.
    CompanionUnavailable."""
    return _load(TORCH_ALLOCATOR, cache, lambda path: TorchAllocator(path, core_table, ordinal))


def _load(part: CompanionPart, cache: Path, opened: Callable[[Path], T]) -> T:
    reason: OSError | None = None
    for folder in (cache, None):
        try:
            path = build(folder or Path(_temporary_folder().name), part)
        except OSError as error:
            reason = error  # the folder cannot be written to
            continue
        try:
            return opened(path)
        except OSError as error:
            reason = error  # it cannot be loaded: damaged, made for another C library, or in a folder without execution
            with contextlib.suppress(OSError):
                path.unlink()
    raise CompanionUnavailable(f"what was compiled for this torch cannot be loaded: {reason}")


def build(folder: Path, part: CompanionPart = COMPANION) -> Path:
    """Returns the part's file in `folder`, compiled where it is missing. OSError (the folder), CompanionUnavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    stem = f"{part.name}-torch{torch.__version__}-{_digest(*_facts(part))}"
    if compiler is None:
        files = sorted(folder.glob(f"{stem}-*.so"))
        if files:
            return files[-1]
        raise CompanionUnavailable(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is in PATH")
    path = folder / f"{stem}-{_digest(compiler, _version(compiler))}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{part.name}-", suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile(compiler, name, part)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _compile(compiler: str, output: str, part: CompanionPart) -> None:
    errors = ""
    options = [*_options(), *_cuda_options(part)]
    libraries = [f"-l{name}" for name in part.libraries]
    for standard in STANDARDS:
        result = _run([compiler, f"-std={standard}", *options, str(part.sources[0]), *libraries, "-o", output])
        if result.returncode == 0:
            return
        errors = errors or result.stderr.strip()[:2000]
    raise CompanionUnavailable(f"{compiler} cannot compile it for torch {torch.__version__}:\n{errors}")


def _options() -> list[str]:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", abi, f"-I{root / 'include'}", f"-L{root / 'lib'}"]


def _cuda_options(part: CompanionPart) -> list[str]:
    """Returns options that find CUDA's headers, where the part needs them. CompanionUnavailable."""
    if not part.needs_cuda:
        return []
    folder, missing = cuda_headers.find(str(torch.version.cuda))
    if folder is None:
        raise CompanionUnavailable(missing)
    return [f"-I{folder}", "-idirafter", str(part.sources[0].parent)]


def _facts(part: CompanionPart) -> list[str]:
    """Returns what a compiled part depends on."""
    sources = [path.read_text() for path in part.sources]
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [torch.__version__, torch.version.git_version, abi, platform.machine(), *platform.libc_ver(), *sources]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).stdout.partition("\n")[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompanionUnavailable(f"{command[0]} cannot be run: {error}") from error


def _digest(*facts: str) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for files that cannot be cached, until this process ends."""
    return tempfile.TemporaryDirectory(prefix="ballonet-")
