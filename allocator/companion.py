"""The companion: the parts of ballonet that link torch. Compiled for the torch found here, kept, and loaded.

There are two. `Companion` links libc10 alone and raises torch's errors. `TorchAllocator` is a CUDA allocator with all
of torch's contract; it links torch's CUDA libraries and needs CUDA's headers, which pip's torch brings.

Note [Where the compiled companion is kept]
    The core is built once for every torch; this part is not, because it throws and subclasses torch's C++ types. It is
    compiled at the first `install()` (about a second) into the user's cache folder. Its name holds what decides whether
    it fits: torch and its C++ ABI, our sources, the C library, and which compiler made it. It does not use Python's
    interface, so that one file serves every Python. It is compiled in a temporary folder of this process and written
    from there as a whole, so that two processes may do it at once and none sees half a file. Where the user's folder is
    not trusted (trusted.py) or cannot be written to, or code in it cannot be run, what lies in the temporary folder is
    loaded. Where there is no compiler, a file that an earlier run with one left behind is used.

Note [Loaded by its descriptor]
    What is loaded is the file that was checked, by its descriptor. The loader takes the name of one, `/proc/self/fd/7`,
    for the name of a library, so no other file may come to have the number: it stays open while the process lives.
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
from typing import ClassVar, Final, TypeVar

import torch

from . import cuda_headers
from .defaults import COMPILE
from .errors import CompanionUnavailable, NotTrusted
from .trusted import TrustedFolder, tell

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


class CompiledPart:
    """A compiled file: where it lies, and a descriptor of what was checked. See Note [Loaded by its descriptor]."""

    _kept: ClassVar[dict[tuple[int, int], int]] = {}  # by device and inode: the descriptor of what was loaded

    def __init__(self, folder: TrustedFolder, name: str) -> None:
        """OSError."""
        self.path: Final = folder.path / name
        self._fd = folder.open(name)

    def load(self, function: str) -> ctypes.CDLL:
        """Loads the library, once, which has to have that function. OSError."""
        status = os.fstat(self._fd)
        fd = self._kept.setdefault((status.st_dev, status.st_ino), self._fd)
        if fd != self._fd:
            os.close(self._fd)
            self._fd = fd
        try:
            library = ctypes.CDLL(f"/proc/self/fd/{fd}")
        except OSError as error:
            raise OSError(f"{self.path} cannot be loaded: {error}") from None
        if not hasattr(library, function):
            raise OSError(f"{self.path} lacks {function}: it was not compiled from the sources of ballonet")
        return library


class Companion:
    """The loaded library. `core_table` is the address of a `BallonetCore` (entry.h), `ordinal` that of its device."""

    def __init__(self, compiled: CompiledPart, core_table: int, ordinal: int) -> None:
        """OSError, CompanionUnavailable."""
        self.path: Final = compiled.path
        self._library = compiled.load("ballonet_companion_init")
        initialize = self._library.ballonet_companion_init
        initialize.argtypes, initialize.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_bool
        self._library.ballonet_cpu_install.restype = ctypes.c_bool
        self._library.ballonet_cpu_restore.restype = ctypes.c_bool
        if not initialize(core_table, ordinal):
            raise CompanionUnavailable(
                f"{self.path} and the native core are of different versions of ballonet: build the core again "
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

    def __init__(self, compiled: CompiledPart, core_table: int, ordinal: int) -> None:
        """OSError, CompanionUnavailable."""
        self._library = compiled.load("ballonet_torch_init")
        initialize, self._place = self._library.ballonet_torch_init, self._library.ballonet_torch_place
        initialize.argtypes, initialize.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_bool
        self._place.restype = ctypes.c_bool
        if not initialize(core_table, ordinal):
            raise CompanionUnavailable(f"{compiled.path} and the native core are of different versions of ballonet")

    def place(self) -> bool:
        """Makes it torch's CUDA allocator. False where torch has used another."""
        return bool(self._place())


def load(cache: Path, core_table: int, ordinal: int) -> Companion:
    """Returns the companion for the torch of this process, compiled into `cache` where it is missing.
    CompanionUnavailable."""
    return _load(COMPANION, cache, lambda compiled: Companion(compiled, core_table, ordinal))


def load_allocator(cache: Path, core_table: int, ordinal: int) -> TorchAllocator:
    """Returns the allocator for the torch of this process, compiled into `cache` where it is missing.
    CompanionUnavailable."""
    return _load(TORCH_ALLOCATOR, cache, lambda compiled: TorchAllocator(compiled, core_table, ordinal))


def _load(part: CompanionPart, cache: Path, opened: Callable[[CompiledPart], T]) -> T:
    reason: OSError | None = None
    for place in (cache, None):
        try:
            folder = TrustedFolder(place or Path(_temporary_folder().name))
            compiled = build(folder, part)
        except OSError as error:
            reason = error  # it is not trusted, or cannot be written to
            if isinstance(error, NotTrusted):
                tell(str(error))
            continue
        try:
            return opened(compiled)
        except OSError as error:
            reason = error  # it is damaged, made for another C library, or in a folder without execution
            with contextlib.suppress(OSError):
                os.unlink(compiled.path.name, dir_fd=folder.fd)
    raise CompanionUnavailable(f"what was compiled for this torch cannot be loaded: {reason}")


def build(folder: TrustedFolder, part: CompanionPart = COMPANION) -> CompiledPart:
    """Returns the part's file in `folder`, compiled where it is missing. OSError (the folder), CompanionUnavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    stem = f"{part.name}-torch{torch.__version__}-{_digest(*_facts(part))}"
    if compiler is None:
        for name in folder.names():
            if name.startswith(f"{stem}-") and name.endswith(".so"):
                try:
                    return CompiledPart(folder, name)
                except NotTrusted as error:
                    tell(str(error))
        raise CompanionUnavailable(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is in PATH")
    name = f"{stem}-{_digest(compiler, _version(compiler))}.so"
    with contextlib.suppress(FileNotFoundError):
        return CompiledPart(folder, name)
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=_temporary_folder().name) as aside:
        output = Path(aside) / name
        _compile(compiler, str(output), part)
        folder.write(name, output.read_bytes(), 0o700)
    return CompiledPart(folder, name)


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
