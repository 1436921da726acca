"""The companion: the part of ballonet that links torch's libc10. Compiled for the torch found here, kept, and loaded.

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
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from .errors import BallonetError

SOURCE: Final = Path(__file__).parent / "csrc" / "companion.cpp"
COMPILERS: Final = ("c++", "g++", "clang++")
STANDARDS: Final = ("c++17", "c++20")  # the first that torch's headers accept
COMPILE_SECONDS: Final = 300

_temporary: tempfile.TemporaryDirectory[str] | None = None


class CompanionUnavailable(BallonetError):
    """The companion can be neither found nor compiled here."""


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
        """Of one of the functions that torch calls (`ballonet_cuda_…`)."""
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value
        assert address is not None
        return address

    def install_cpu(self) -> bool:
        """torch's CPU memory comes from the core from now on. False where another allocator has displaced this one."""
        return bool(self._library.ballonet_cpu_install())

    def pause_cpu(self) -> None:
        """New CPU memory comes from torch's own allocator; what lives is still freed to the core."""
        self._library.ballonet_cpu_pause()

    def restore_cpu(self) -> bool:
        """Puts torch's own CPU allocator back; nothing of the core may live. False where another displaced it."""
        return bool(self._library.ballonet_cpu_restore())

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside, this thread's CPU memory comes from torch's own allocator."""
        self._library.ballonet_cpu_stock_begin()
        try:
            yield
        finally:
            self._library.ballonet_cpu_stock_end()


def load(cache: Path, core_table: int, ordinal: int) -> Companion:
    """The companion for the torch of this process, compiled into `cache` where it is missing. CompanionUnavailable."""
    reason: OSError | None = None
    for folder in (cache, None):
        try:
            path = build(folder or _temporary_folder())
        except OSError as error:
            reason = error  # the folder cannot be written to
            continue
        try:
            return Companion(path, core_table, ordinal)
        except OSError as error:
            reason = error  # it cannot be loaded: damaged, made for another C library, or in a folder without execution
            with contextlib.suppress(OSError):
                path.unlink()
    raise CompanionUnavailable(f"what was compiled for this torch cannot be loaded: {reason}")


def build(folder: Path) -> Path:
    """The companion's file in `folder`, compiled where it is missing. OSError (the folder), CompanionUnavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    stem = f"companion-torch{torch.__version__}-{_digest(*_facts())}"
    if compiler is None:
        found = sorted(folder.glob(f"{stem}-*.so"))
        if found:
            return found[-1]
        raise CompanionUnavailable(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is in PATH")
    path = folder / f"{stem}-{_digest(compiler, _version(compiler))}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".companion-", suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile(compiler, name)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _compile(compiler: str, output: str) -> None:
    errors = ""
    for standard in STANDARDS:
        result = _run([compiler, f"-std={standard}", *_options(), str(SOURCE), "-lc10", "-o", output])
        if result.returncode == 0:
            return
        errors = errors or result.stderr.strip()[:2000]
    raise CompanionUnavailable(f"{compiler} cannot compile it for torch {torch.__version__}:\n{errors}")


def _options() -> list[str]:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", abi, f"-I{root / 'include'}", f"-L{root / 'lib'}"]


def _facts() -> list[str]:
    """What a compiled companion must agree with."""
    sources = [path.read_text() for path in (SOURCE, SOURCE.with_name("entry.h"))]
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [torch.__version__, torch.version.git_version, abi, platform.machine(), *platform.libc_ver(), *sources]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).stdout.partition("\n")[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompanionUnavailable(f"{command[0]} cannot be run: {error}") from error


def _digest(*facts: str) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def _temporary_folder() -> Path:
    global _temporary
    if _temporary is None:
        _temporary = tempfile.TemporaryDirectory(prefix="ballonet-")
    return Path(_temporary.name)
