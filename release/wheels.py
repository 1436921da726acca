"""What is released, in dist/: the sdist, and a wheel of what is built from it for each Python that is found.

    python release/wheels.py                            all, as `make wheel` does
    python release/wheels.py --torch "2.13.0 2.15.0"    with the parts that link torch for these releases only, or none
    python release/wheels.py --python "python3.12"      for these interpreters only

A wheel brings the parts of ballonet that link torch (allocator/torch_parts.py), compiled for every release of torch in
allocator/versions.py. That takes a release's headers, which its wheel has: 530 MB, fetched once, of which 39 MB stay in
build/torch-headers/. Where it cannot be fetched, the torch that is installed serves as far as it goes. Said at the end:
which wheels there are, what they bring for which torch, what is missing and why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ballonet.allocator import cuda_headers, versions
from ballonet.allocator.errors import CompanionUnavailable
from ballonet.allocator.torch_parts import (
    COMPANION,
    TORCH_ALLOCATOR,
    TorchBuild,
    TorchPart,
    compile_part,
    file_name,
    installed_build,
    read_build,
    required_compiler,
)

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
DIST = ROOT / "dist"
OLDEST = (3, 11)
PARTS = {COMPANION: "companion", TORCH_ALLOCATOR: "CUDA allocator"}
# Asked of an interpreter: which it is, and whether something can be compiled for it.
QUESTION = (
    "import os, sys, sysconfig; "
    "print(*sys.version_info[:2], os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
)


class Interpreter(NamedTuple):
    """A Python that wheels can be made for."""

    path: Path
    version: tuple[int, int]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass
class TorchRelease:
    """A release of torch: the files that a wheel brings for it, and why parts are missing."""

    version: str
    files: dict[TorchPart, Path] = field(default_factory=dict)
    missing: dict[TorchPart, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Returns one line: what there is for it, what is missing, and why."""
        said = [" and ".join(PARTS[part] for part in self.files)] if self.files else []
        for reason in dict.fromkeys(self.missing.values()):
            names = [PARTS[part] for part in self.missing if self.missing[part] == reason]
            said.append(f"no {' and no '.join(names)}: {reason}")
        return f"torch {self.version}: {'; '.join(said)}"


def run(*command: object, **variables: str) -> str:
    """Runs a command and returns what it printed. Apart from the terminal, where a build would say how far it is.
    subprocess.CalledProcessError."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        check=True,
        capture_output=True,
        text=True,
        env={**kept, **variables},
        start_new_session=True,
    )
    return done.stdout


def last_line(error: subprocess.CalledProcessError) -> str:
    """Returns what a command that failed said last."""
    lines = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {error.returncode}"


# -- Pythons


def candidates(folders: Iterable[Path]) -> Iterator[Path]:
    """Yields what is called python3.N in these folders."""
    for folder in folders:
        yield from sorted(path for path in folder.glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))


def folders() -> list[Path]:
    """Returns the folders where Pythons are looked for: those of PATH, and those that pyenv has made."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [*map(Path, filter(None, os.environ["PATH"].split(os.pathsep))), *sorted(pyenv.glob("versions/*/bin"))]


def choose_pythons(paths: Iterable[Path]) -> tuple[list[Interpreter], list[str]]:
    """Returns an interpreter of each version that a wheel can be made for, the oldest version first, and a line for
    each version that is left out."""
    chosen: dict[tuple[int, int], Interpreter] = {}
    refused: dict[tuple[int, int], str] = {}
    for path in paths:
        try:
            major, minor, has_headers = run(path, "-c", QUESTION).split()
        except (OSError, subprocess.CalledProcessError):
            continue  # a name of a version manager, which leads to no Python now
        version = int(major), int(minor)
        if version < OLDEST:
            refused[version] = f"Python {major}.{minor}: left out, as 3.11 or newer is needed"
        elif has_headers != "True":
            refused[version] = f"Python {major}.{minor}: left out, as {path} comes without Python.h"
        else:
            chosen.setdefault(version, Interpreter(path, version))
    return [chosen[version] for version in sorted(chosen)], [
        refused[version] for version in sorted(refused) if version not in chosen
    ]


# -- Parts that link torch


def fetch(requirement: str, wanted: str, folder: Path) -> None:
    """Puts those files of a package's wheel that match `wanted` into `folder`, all or none. CompanionUnavailable."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=BUILD) as aside:
        options = ("--no-deps", "--no-input", "--quiet", "--progress-bar", "off", "--dest", aside)
        try:
            run(sys.executable, "-m", "pip", "download", *options, requirement)
        except subprocess.CalledProcessError as error:
            raise CompanionUnavailable(f"{requirement} cannot be fetched ({last_line(error)})") from None
        (wheel,) = Path(aside).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(aside) / "out", [name for name in archive.namelist() if re.match(wanted, name)])
        folder.parent.mkdir(parents=True, exist_ok=True)
        (Path(aside) / "out").replace(folder)


def torch_of(version: str) -> TorchBuild:
    """Returns that release of torch, built with CUDA: its headers, and libraries to link that are empty but for their
    names. CompanionUnavailable."""
    folder = BUILD / "torch-headers" / version
    if not folder.exists():
        print(f"torch {version}: fetching its headers, in a wheel of 530 MB", flush=True)
        # === is this version and no other: 2.13.0+cpu, which lacks some of the headers, would be taken for a newer one
        fetch(f"torch==={version}", r"torch/(include/|version\.py$)", folder)
    build = read_build(folder / "torch")
    assert build is not None, folder
    (build.folder / "lib").mkdir(exist_ok=True)
    for name in {name for part in PARTS for name in part.libraries}:
        library = build.folder / "lib" / f"lib{name}.so"
        if not library.exists():
            run(required_compiler(), "-shared", "-x", "c++", os.devnull, f"-Wl,-soname,{library.name}", "-o", library)
    return build


def find_cuda_headers(cuda: str) -> None:
    """Fetches CUDA's headers of that version where this machine has none. CompanionUnavailable."""
    major = int(cuda.partition(".")[0])
    folder = BUILD / "torch-headers" / f"cuda-{major}"
    if cuda_headers.find(cuda)[0] is None:
        if not folder.exists():
            package = f"nvidia-cuda-runtime=={major}.*" if major >= 13 else f"nvidia-cuda-runtime-cu{major}"
            fetch(package, r"nvidia/.*/include/", folder)
        sys.path.append(str(folder))


def make_parts(version: str, into: Path, installed: TorchBuild | None) -> TorchRelease:
    """Compiles the parts for a release of torch into a folder, but for those that are there. `installed`: the torch of
    this Python, which serves where its release cannot be fetched."""
    release = TorchRelease(version)
    try:
        build = torch_of(version)
    except CompanionUnavailable as error:
        if installed is None or installed.release != version:
            release.missing = dict.fromkeys(PARTS, str(error))
            return release
        build = installed
    for part in PARTS:
        made = into / file_name(part, build)
        try:
            if not made.exists():
                print(f"torch {version}: compiling the {PARTS[part]}", flush=True)
                if part.needs_cuda and build.cuda is not None:
                    find_cuda_headers(build.cuda)
                compile_part(part, build, made.with_suffix(".new"))
                made.with_suffix(".new").replace(made)
            release.files[part] = made
        except CompanionUnavailable as error:
            release.missing[part] = str(error)
    return release


# -- Wheels


def make_sdist(into: Path) -> Path:
    """Returns the sdist. subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="sdist-", dir=BUILD) as aside:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", aside, ROOT)
        (sdist,) = Path(aside).iterdir()
        return Path(shutil.move(sdist, into / sdist.name))


def make_wheel(sdist: Path, python: Interpreter, parts: Path, into: Path) -> Path:
    """Returns the manylinux wheel for that Python, which brings the files in `parts`. subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=BUILD) as aside:
        pip = (sys.executable, "-m", "pip", "--python", python.path)
        run(*pip, "wheel", "--no-deps", "--wheel-dir", aside, sdist, BALLONET_PARTS=str(parts))
        (plain,) = Path(aside).glob("*.whl")
        # torch's libraries are those of the torch that is found
        excluded = [f"--exclude=lib{name}.so" for name in sorted({name for part in PARTS for name in part.libraries})]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        repaired = Path(aside) / "repaired"
        run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", repaired, plain, PATH=path)
        (wheel,) = repaired.glob("*.whl")
        return Path(shutil.move(wheel, into / wheel.name))


def report(made: list[Path], without: list[str], releases: list[TorchRelease]) -> Iterator[str]:
    """Yields what a reader of the outcome looks for: files with their sizes, Pythons that have none, and what the
    wheels bring for which torch."""
    for path in made:
        yield f"{path.parent.name}/{path.name}  {path.stat().st_size / 1e6:.1f} MB"
    yield from without
    yield from (release.summary() for release in releases)
    yield "any other torch: compiled at the first install(), which takes a C++ compiler"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=" ".join(versions.TORCH_RELEASES), help="releases of torch, or none")
    parser.add_argument("--python", default="", help="interpreters, by default all that are found")
    asked = parser.parse_args()
    try:
        required_compiler()
    except CompanionUnavailable as error:
        sys.exit(f"a wheel cannot be made: {error}")
    for folder in (DIST, BUILD / "torch-parts"):
        folder.mkdir(parents=True, exist_ok=True)
    named = [Path(shutil.which(name) or name) for name in asked.python.split()]
    pythons, without = choose_pythons(named or candidates([Path(sys.executable).parent, *folders()]))
    versions_asked = [version for version in asked.torch.split() if version != "none"]
    installed = installed_build()
    releases = [make_parts(version, BUILD / "torch-parts", installed) for version in versions_asked]
    failed = False
    with tempfile.TemporaryDirectory(prefix="parts-", dir=BUILD) as parts:
        for file in (file for release in releases for file in release.files.values()):
            shutil.copy(file, parts)
        made = [make_sdist(DIST)]
        for python in pythons:
            begun = time.monotonic()
            print(f"Python {python.text}: compiling the core", end="", flush=True)
            try:
                made.append(make_wheel(made[0], python, Path(parts), DIST))
            except subprocess.CalledProcessError as error:
                failed = True
                without.append(f"Python {python.text}: its wheel cannot be made ({last_line(error)})")
            print(f", {time.monotonic() - begun:.0f} s", flush=True)
    print(*report(made, without, releases), sep="\n")
    return int(failed or len(made) == 1)


if __name__ == "__main__":
    sys.exit(main())
