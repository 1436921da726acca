"""Builds the two native pieces of ballonet: the core and the host stand-in. Neither needs torch or a CUDA toolkit.

Only what pyproject.toml cannot say lives here: where the packages are and how the extensions are compiled.

Note [Without a compiler]
    Where a small C++ program cannot be built the package is built without the two, so that what needs no pages can
    still be used. Why is written into the package (allocator/_native.py reads it), to stderr, and to the terminal if
    there is one: pip shows what a build says only where it fails. An error in the core itself ends the build as ever,
    and so does a build in place, which is there for the core alone.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

HEADERS = sorted(glob("allocator/csrc/**/*.h", recursive=True))
# Compiled at the first use, against the torch found there, by allocator/companion.py.
COMPILED_LATER = ["csrc/torch/*.*", "csrc/torch/crt/*"]
CORE = sorted(each for each in glob("allocator/csrc/*/*.cpp") if Path(each).parent.name not in ("torch", "standin"))
STANDIN = sorted(glob("allocator/csrc/standin/*.cpp"))
ROOMS = ("allocator", "offload", "hooks")
PACKAGES = [
    "ballonet",
    "ballonet.cli",
    "ballonet.testing",
    *(
        "ballonet." + ".".join(Path(init).parent.parts)
        for room in ROOMS
        for init in sorted(glob(f"{room}/**/__init__.py", recursive=True))
    ),
]
COMPILE = ["-O2", "-g0", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]


def outdated(target: str, sources: list[str]) -> bool:
    """Whether the target is missing, or older than one of the files it is made from."""
    made = Path(target)
    return not made.exists() or any(Path(source).stat().st_mtime > made.stat().st_mtime for source in sources)


def needs_compile(obj: str, source: str) -> bool:
    """Compile a file again when it, or any header, is newer than its object."""
    return outdated(obj, [source, *HEADERS, __file__])


WITHOUT = "ballonet/allocator/without_core.txt"
PROBE = "#include <Python.h>\n#include <optional>\nint main() { return std::optional<int>(0).value(); }\n"


def tell(text: str) -> None:
    """Says it on stderr and on the terminal."""
    print(text, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\n{text}\n")


class BuildExt(build_ext):
    """An editable install takes what was built in place before, where nothing of it has changed since."""

    def run(self) -> None:
        asked = os.environ.get("CXX", "").split()[:1]
        if not any(map(shutil.which, asked or ("c++", "g++", "clang++"))):
            looked = asked[0] if asked else "c++, g++ or clang++"
            self.do_without(f"it needs a C++17 compiler and finds no {looked}")
        else:
            super().run()

    def build_extensions(self) -> None:
        if problem := self.problem():
            self.do_without(problem)
        else:
            Path(self.build_lib, WITHOUT).unlink(missing_ok=True)  # of an earlier build
            super().build_extensions()

    def problem(self) -> str | None:
        """Why the compiler cannot build a small program of C++17 that includes Python's headers; None if it can."""
        asked = os.environ.get("CXX") or "the C++ compiler"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(PROBE)
            try:
                made = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=["-std=c++17", "-fPIC"])
                self.compiler.link_shared_object(made, str(Path(folder, "probe.so")), target_lang="c++")
            except (CCompilerError, ExecError, PlatformError) as error:
                print(error, file=sys.stderr)
                return f"{asked} cannot build a small program of C++17 that includes Python's headers"
        return None

    def do_without(self, problem: str) -> None:
        """See Note [Without a compiler]."""
        remedy = "install a compiler (Debian: apt install g++ python3-dev)"
        if self.inplace or self.editable_mode:
            sys.exit(f"ballonet's native core cannot be built: {problem}. To go on: {remedy}")
        note = Path(self.build_lib, WITHOUT)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(problem)
        tell(
            f"ballonet is installed WITHOUT ITS NATIVE CORE: {problem}. So install(), manage(), run and serve raise "
            "CoreMissing, and only what needs no pages works (info, load). To have it: "
            f"{remedy}, then pip install --force-reinstall --no-cache-dir ballonet"
        )
        self.extensions = []

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        in_place = Path("allocator", target.name)
        if self.editable_mode and not outdated(str(in_place), [*ext.sources, *ext.depends]):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(in_place, target)
        else:
            super().build_extension(ext)


ParallelCompile("BALLONET_BUILD_JOBS", default=0, needs_recompile=needs_compile).install()

core = Pybind11Extension(
    "ballonet.allocator._native",
    CORE,
    include_dirs=["allocator/csrc"],
    depends=[*HEADERS, "setup.py"],
    extra_compile_args=COMPILE,
    extra_link_args=["-pthread"],
    libraries=["dl"],
    cxx_std=17,
)
# A plain shared object with libcuda's symbols, not a Python module: it is opened with dlopen, by its path.
standin = Extension(
    "ballonet.allocator._standin",
    STANDIN,
    include_dirs=["allocator/csrc"],
    depends=[*HEADERS, "setup.py"],
    extra_compile_args=["-std=c++17", *COMPILE],
    extra_link_args=["-pthread"],
    language="c++",
)

setup(
    license="Apache-2.0",
    packages=PACKAGES,
    package_dir={
        "ballonet": "src/ballonet",
        "ballonet.allocator": "allocator",
        "ballonet.offload": "offload",
        "ballonet.hooks": "hooks",
    },
    package_data={
        "ballonet": ["py.typed"],
        "ballonet.allocator": ["_native.pyi", *COMPILED_LATER],
    },
    include_package_data=False,
    ext_modules=[core, standin],
    cmdclass={"build_ext": BuildExt},
)
