"""Builds the two native pieces of ballonet: the core and the host stand-in. Neither needs torch or a CUDA toolkit.

Only what pyproject.toml cannot say lives here: where the packages are and how the extensions are compiled.

Note [Without a compiler]
    Where a small C++ program cannot be built the package is built without the two, so that what needs no pages can
    still be used. Why is written into the package (allocator/_native.py reads it), to stderr, and to the terminal if
    there is one: pip shows what a build says only where it fails. An error in the core itself ends the build as ever,
    and so does a build in place, which is there for the core alone.

Note [Units]
    Most of the time that a file takes goes to the headers it includes and to what they define, in the bindings as well,
    so the files of a folder are compiled as one, by a file that includes them. Names in the unnamed namespaces of a
    folder are therefore all different. The two libraries are compiled at the same time, as what a second core would do
    beside the last file of each.

Note [Pythons and torches]
    pybind11 has no stable ABI, and `bindings_frames.cpp` reads the frames of Python 3.11, so the core is built for each
    Python; the stand-in and what links torch serve all. The latter comes compiled only with the wheels of
    .ci/wheels.py, which names its folder in BALLONET_PARTS.
"""

import contextlib
import copy
import itertools
import os
import shutil
import sys
import tempfile
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError, ExecError, PlatformError

HEADERS = sorted(glob("allocator/csrc/**/*.h", recursive=True))
# Compiled by allocator/companion.py for a torch that no wheel brings it for.
COMPILED_LATER = ["csrc/torch/*.*", "csrc/torch/crt/*"]
CORE = sorted(path for path in glob("allocator/csrc/*/*.cpp") if Path(path).parent.name not in ("torch", "standin"))
STANDIN = sorted(glob("allocator/csrc/standin/*.cpp"))
JOBS = "BALLONET_BUILD_JOBS"  # how many files of a library are compiled at a time, by default one per core
UNITS = Path("build", "units")
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
    """Compile a file again when it, what it includes of its folder, or any header is newer than its object."""
    return outdated(obj, [source, *glob(f"allocator/csrc/{Path(source).stem}/*.cpp"), *HEADERS, __file__])


def units(sources: list[str]) -> list[str]:
    """What is compiled of the sources: see Note [Units]. Writes those that are missing, or not as they should be."""
    UNITS.mkdir(parents=True, exist_ok=True)
    folders = sorted({Path(source).parent for source in sources})
    for folder in folders:
        text = "".join(f'#include "{folder.name}/{path.name}"\n' for path in sorted(folder.glob("*.cpp")))
        unit = UNITS / f"{folder.name}.cpp"
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
    return [str(UNITS / f"{folder.name}.cpp") for folder in folders]


WITHOUT = "ballonet/allocator/without_core.txt"
PROBE = "#include <Python.h>\n#include <optional>\nint main() { return std::optional<int>(0).value(); }\n"


def tell(text: str) -> None:
    """Says it on stderr and, below what pip shows there, on the terminal."""
    print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\n{text}\n")


class BuildPy(build_py):
    """Adds what is compiled already, see Note [Pythons and torches]."""

    def run(self) -> None:
        super().run()
        if parts := os.environ.get("BALLONET_PARTS"):
            shutil.copytree(parts, Path(self.build_lib, "ballonet/allocator/prebuilt"), dirs_exist_ok=True)


class BuildExt(build_ext):
    """Compiles in units, and says how far it is. An editable install takes what was built in place before, where
    nothing of it has changed since."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.environ.get(JOBS) != "1"

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
            self.tell_progress()
            super().build_extensions()

    def tell_progress(self) -> None:
        """Has the compiler say what it has compiled, of how much."""
        names = [name for ext in self.extensions for name in units(ext.sources)]
        objects = self.compiler.object_filenames(names, output_dir=self.build_temp)
        total = sum(map(needs_compile, objects, names))
        compile_one, done = self.compiler._compile, itertools.count(1)

        def compile_and_tell(obj: str, source: str, *options: object) -> None:
            compile_one(obj, source, *options)
            text = f"ballonet: compiled {next(done)} of {total} parts of the native core ({Path(source).stem})"
            print(text, file=sys.stderr, flush=True) if self.inplace else tell(text)

        self.compiler._compile = compile_and_tell

    def get_ext_filename(self, name: str) -> str:
        """The stand-in is a library, and serves every Python."""
        if name.rpartition(".")[2] == "_standin":
            return os.path.join(*name.split(".")) + ".so"
        return super().get_ext_filename(name)

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
            compiled = copy.copy(ext)
            compiled.sources, compiled.depends = units(ext.sources), [*ext.depends, *ext.sources]
            super().build_extension(compiled)


ParallelCompile(JOBS, default=0, needs_recompile=needs_compile).install()

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
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
