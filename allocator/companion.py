"""The companion: the parts of ballonet that link torch (torch_parts.py), chosen for the torch found here, and loaded.

Note [Where a compiled part is]
    A wheel brings the parts for the releases of torch that there were when it was made (`make wheel`). For another
    torch, and in a checkout, a part is compiled at the first `install()`, within seconds, into the user's cache folder,
    and one line says so. It is compiled in a temporary folder of this process and written from there as a whole, so
    that two processes may do it at once and none sees half a file. Where the user's folder is not trusted (trusted.py)
    or cannot be written to, or code in it cannot be run, what lies in the temporary folder is loaded. Where there is no
    compiler, a file that an earlier run with one left behind is used.

Note [Loaded by its descriptor]
    What is loaded is the file that was checked, by its descriptor. The loader takes the name of one, `/proc/self/fd/7`,
    for the name of a library, so no other file may come to have the number: it stays open while the process lives.
    What came with the wheel is trusted as the code beside it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import torch

from .errors import CompanionUnavailable, NotTrusted
from .torch_parts import COMPANION, PREBUILT, TORCH_ALLOCATOR, TorchBuild, TorchPart, compile_part, file_name
from .trusted import TrustedFolder, tell

T = TypeVar("T")


class CompiledPart:
    """A compiled file: where it lies, and a descriptor of what was checked. See Note [Loaded by its descriptor]."""

    _kept: ClassVar[dict[tuple[int, int], int]] = {}  # by device and inode: the descriptor of what was loaded

    def __init__(self, path: Path, fd: int) -> None:
        self.path: Final = path
        self._fd = fd

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
    """Returns the companion for the torch of this process, compiled into `cache` where no wheel has brought it.
    CompanionUnavailable."""
    return _load(COMPANION, cache, lambda compiled: Companion(compiled, core_table, ordinal))


def load_allocator(cache: Path, core_table: int, ordinal: int) -> TorchAllocator:
    """Returns the allocator for the torch of this process, compiled into `cache` where no wheel has brought it.
    CompanionUnavailable."""
    return _load(TORCH_ALLOCATOR, cache, lambda compiled: TorchAllocator(compiled, core_table, ordinal))


def _load(part: TorchPart, cache: Path, open_part: Callable[[CompiledPart], T]) -> T:
    reason: OSError | None = None
    with contextlib.suppress(FileNotFoundError):
        compiled = prebuilt(part)
        try:
            return open_part(compiled)
        except OSError as error:
            reason = error  # the C library here is older than what it was made for
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
            return open_part(compiled)
        except OSError as error:
            reason = error  # it is damaged, made for another C library, or in a folder without execution
            with contextlib.suppress(OSError):
                os.unlink(compiled.path.name, dir_fd=folder.fd)
    raise CompanionUnavailable(f"what was compiled for this torch cannot be loaded: {reason}")


def this_torch() -> TorchBuild:
    """Returns the build of torch in this process."""
    return TorchBuild(
        Path(torch.__file__).parent,
        torch.__version__,
        str(torch.version.git_version),
        torch.version.cuda,
        bool(torch._C._GLIBCXX_USE_CXX11_ABI),
    )


def prebuilt(part: TorchPart) -> CompiledPart:
    """Returns the part's file that came with this wheel for the torch of this process. FileNotFoundError: none did."""
    path = PREBUILT / file_name(part, this_torch())
    return CompiledPart(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def build(folder: TrustedFolder, part: TorchPart = COMPANION) -> CompiledPart:
    """Returns the part's file in `folder`, compiled where it is missing. OSError (the folder), CompanionUnavailable."""
    name = file_name(part, this_torch())
    with contextlib.suppress(FileNotFoundError):
        return CompiledPart(folder.path / name, folder.open(name))
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=_temporary_folder().name) as aside:
        output = Path(aside) / name
        compile_part(part, this_torch(), output, lambda: _announce(folder.path))
        folder.write(name, output.read_bytes(), 0o700)
    return CompiledPart(folder.path / name, folder.open(name))


@functools.cache
def _announce(folder: Path) -> None:
    """Says that parts are compiled, why, and where they are kept: once for both."""
    names = [path.name.split("-")[1] for path in PREBUILT.glob(f"{COMPANION.name}-*.so")]
    brought = sorted(name.removeprefix("torch") for name in names)
    why = f"this wheel brings it for {', '.join(brought)}" if brought else "no wheel has brought it"
    print(
        f"ballonet: compiling the companion for torch {torch.__version__} once, into {folder}: {why}",
        file=sys.stderr,
        flush=True,
    )


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for files that cannot be cached, until this process ends."""
    return tempfile.TemporaryDirectory(prefix="ballonet-")
