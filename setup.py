"""Builds the two native pieces of ballonet: the core and the host stand-in. Neither needs torch or a CUDA toolkit.

Only what pyproject.toml cannot say lives here: where the packages are and how the extensions are compiled.
"""

import os
import shutil
import sys
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = sorted(glob("allocator/csrc/**/*.h", recursive=True))
# Compiled at the first use, against the torch found there, by allocator/companion.py.
COMPILED_LATER = ["csrc/companion.cpp", "csrc/entry.h", "csrc/driver_abi.h", "csrc/torch/*.*", "csrc/torch/crt/*"]
CORE = sorted(set(glob("allocator/csrc/*.cpp")) - {"allocator/csrc/companion.cpp"})
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


class BuildExt(build_ext):
    """An editable install takes what was built in place before, where nothing of it has changed since."""

    def run(self) -> None:
        asked = os.environ.get("CXX", "").split()[:1]
        if not any(map(shutil.which, asked or ("c++", "g++", "clang++"))):
            looked = asked[0] if asked else "c++, g++ or clang++"
            sys.exit(f"ballonet needs a C++17 compiler and finds no {looked}: install one (Debian: apt install g++)")
        super().run()

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
        "ballonet.offload.timeline": ["page.html"],
    },
    include_package_data=False,
    ext_modules=[core, standin],
    cmdclass={"build_ext": BuildExt},
)
