"""The parts of ballonet that link torch: their sources, the builds of torch that a compiled one fits, the compiler.

There are two. `COMPANION` links libc10 alone and raises torch's errors. `TORCH_ALLOCATOR` is a CUDA allocator with all
of torch's contract; it links torch's CUDA libraries and needs CUDA's headers. Imports no torch: a wheel brings both for
releases of torch that are not installed where it is made.

Note [What a compiled part fits]
    The core is built once for every torch; these parts are not, because they throw and subclass torch's C++ types. The
    name of a file holds what decides whether it fits: the part, torch's release, and as a digest the commit that torch
    was built from, its C++ ABI, the machine and our sources. Builds of one commit for CPUs and for several versions of
    CUDA agree in all that the parts use of them, so one file serves all. No interface of Python's is used, so one
    serves every Python. The compiler and the C library are not in the name: all compilers of an ABI agree, and a C
    library that is too old is told by the loader, whereupon the part is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import cuda_headers
from .defaults import COMPILE
from .errors import CompanionUnavailable

CSRC: Final = Path(__file__).parent / "csrc"
COMPILERS: Final = ("c++", "g++", "clang++")
STANDARDS: Final = ("c++17", "c++20")  # the first that torch's headers accept
# What a wheel brings, named as `file_name` does.
PREBUILT: Final = Path(__file__).parent / "prebuilt"


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch, as far as compiled parts have to fit it. `folder`: of the package; `cuda`: its version of CUDA,
    None where it has none."""

    folder: Path
    version: str
    commit: str
    cuda: str | None
    cxx11_abi: bool = True

    @property
    def release(self) -> str:
        """The version without what tells builds of one release apart, as "+cpu"."""
        return self.version.partition("+")[0]


@dataclass(frozen=True)
class TorchPart:
    """One file to compile: `sources`, of which the first is compiled, and the libraries of torch that it links."""

    name: str
    sources: tuple[Path, ...]
    libraries: tuple[str, ...]
    needs_cuda: bool = False


COMPANION: Final = TorchPart("companion", (CSRC / "torch" / "companion.cpp", CSRC / "torch" / "entry.h"), ("c10",))
TORCH_ALLOCATOR: Final = TorchPart(
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


def read_build(folder: Path) -> TorchBuild | None:
    """Returns what torch's package in `folder` says of itself; None where it says nothing. pip's have had the newer C++
    ABI for as long as they are supported here."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    facts = dict(re.findall(r"^(\w+)\b.*= '([^']*)'$", text, re.MULTILINE))
    if "__version__" not in facts:
        return None
    return TorchBuild(folder, facts["__version__"], facts.get("git_version", ""), facts.get("cuda"))


def installed_build() -> TorchBuild | None:
    """Returns the torch that is installed for this Python, without importing it; None where there is none."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else read_build(Path(spec.origin).parent)


def file_name(part: TorchPart, build: TorchBuild) -> str:
    """Returns the name of the part's file for that build. See Note [What a compiled part fits]."""
    sources = [path.read_text() for path in part.sources]
    facts = "\0".join([build.commit, str(build.cxx11_abi), platform.machine(), *sources])
    return f"{part.name}-torch{build.release}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.so"


def compiler() -> str | None:
    """Returns the path of the C++ compiler; None where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def required_compiler() -> str:
    """Returns the path of the C++ compiler. CompanionUnavailable where there is none."""
    program = compiler()
    if program is None:
        raise CompanionUnavailable(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is in PATH")
    return program


def compile_part(part: TorchPart, build: TorchBuild, output: Path, begin: Callable[[], None] = lambda: None) -> None:
    """Compiles the part for that build of torch, and calls `begin` before, where there is all that it takes.
    CompanionUnavailable."""
    program = required_compiler()
    errors = ""
    options = [*options_for(build), *_cuda_options(part, build)]
    libraries = [f"-l{name}" for name in part.libraries]
    begin()
    for standard in STANDARDS:
        result = _run([program, f"-std={standard}", *options, str(part.sources[0]), *libraries, "-o", str(output)])
        if result.returncode == 0:
            return
        errors = errors or result.stderr.strip()[:2000]
    raise CompanionUnavailable(f"{program} cannot compile it for torch {build.version}:\n{errors}")


def options_for(build: TorchBuild) -> list[str]:
    """Returns the compiler's options for a library that links that build of torch."""
    return [
        *("-O2", "-fPIC", "-shared", "-s", "-fvisibility=hidden"),
        f"-ffile-prefix-map={CSRC}=csrc",  # errors name sources, and are the same wherever it was compiled
        f"-ffile-prefix-map={build.folder}=torch",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(build.cxx11_abi)}",
        f"-I{build.folder / 'include'}",
        "-Wl,--no-as-needed",  # torch's libraries are found by their names, whatever of them is used
        f"-L{build.folder / 'lib'}",
    ]


def _cuda_options(part: TorchPart, build: TorchBuild) -> list[str]:
    """Returns options that find CUDA's headers, where the part needs them. CompanionUnavailable."""
    if not part.needs_cuda:
        return []
    if build.cuda is None:
        raise CompanionUnavailable(f"torch {build.version} is built without CUDA")
    folder, missing = cuda_headers.find(build.cuda)
    if folder is None:
        raise CompanionUnavailable(missing)
    return [f"-I{folder}", "-idirafter", str(part.sources[0].parent)]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompanionUnavailable(f"{command[0]} cannot be run: {error}") from error
