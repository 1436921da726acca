"""What is released, in dist/: the sdist, and a wheel of what is built from it for each Python that is found.

    python .ci/wheels.py                            all, as `make wheel` does
    python .ci/wheels.py --torch "2.13.0 2.15.0"    with the parts that link torch for these releases only, or none
    python .ci/wheels.py --python "python3.12"      for these interpreters only

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
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import ballonet
from ballonet.allocator import cuda_headers, versions
from ballonet.allocator.errors import CompanionUnavailable
from ballonet.allocator.torch_parts import (
    COMPANION,
    TORCH_ALLOCATOR,
    TorchBuild,
    compile_part,
    file_name,
    installed_build,
    read_build,
    required_compiler,
)

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
DIST = ROOT / "dist"
PARTS = {COMPANION: "companion", TORCH_ALLOCATOR: "CUDA allocator"}
LIBRARIES = sorted({name for part in PARTS for name in part.libraries})
Version = tuple[int, int]
# Asked of an interpreter: which it is, and whether something can be compiled for it.
QUESTION = (
    "import os, sys, sysconfig; "
    "print(*sys.version_info[:2], os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
)


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
    return f"exit status {error.returncode}\n{error.stdout}\n{error.stderr}".rstrip().rpartition("\n")[2].strip()


def candidates() -> Iterator[Path]:
    """Yields what is called python3.N: this Python's, those of PATH, and those that pyenv has made."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    in_path = map(Path, filter(None, os.environ["PATH"].split(os.pathsep)))
    for folder in (Path(sys.executable).parent, *in_path, *sorted(pyenv.glob("versions/*/bin"))):
        yield from sorted(path for path in folder.glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))


def choose_pythons(paths: Iterable[Path]) -> tuple[dict[Version, Path], list[str]]:
    """Returns an interpreter of each version that a wheel can be made for, and why other versions have none."""
    chosen, refused = dict[Version, Path](), dict[Version, str]()
    for path in paths:
        try:
            major, minor, has_headers = run(path, "-c", QUESTION).split()
        except (OSError, subprocess.CalledProcessError):
            continue  # a name of a version manager, which leads to no Python now
        version = int(major), int(minor)
        if version >= (3, 11) and has_headers == "True":
            chosen.setdefault(version, path)
        elif version >= (3, 11):
            refused[version] = f"Python {major}.{minor}: left out, as {path} comes without Python.h"
    left_out = [refused[version] for version in sorted(refused.keys() - chosen)]
    return {version: chosen[version] for version in sorted(chosen)}, left_out


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
    for name in LIBRARIES:
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


def make_parts(version: str, into: Path, installed: TorchBuild | None) -> tuple[list[Path], str]:
    """Compiles the parts for a release of torch into a folder, but for those that are there. `installed`: the torch of
    this Python, which serves where its release cannot be fetched. Returns the files, and a line that says what there is
    and why the rest is missing."""
    try:
        build = torch_of(version)
    except CompanionUnavailable as error:
        if installed is None or installed.release != version:
            return [], f"torch {version}: nothing, {error}"
        build = installed
    made, said = list[Path](), list[str]()
    for part, name in PARTS.items():
        file = into / file_name(part, build)
        try:
            if not file.exists():
                print(f"torch {version}: compiling the {name}", flush=True)
                if part.needs_cuda and build.cuda is not None:
                    find_cuda_headers(build.cuda)
                compile_part(part, build, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
            made.append(file)
            said.append(name)
        except CompanionUnavailable as error:
            said.append(f"no {name} ({error})")
    return made, f"torch {version}: {', '.join(said)}"


def make_sdist(into: Path) -> Path:
    """Returns the sdist. subprocess.CalledProcessError."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", into, ROOT)
    return into / f"ballonet-{ballonet.__version__}.tar.gz"


def make_wheel(sdist: Path, python: Path, parts: Path, into: Path) -> Path:
    """Returns the manylinux wheel for that Python, which brings the files in `parts`. subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=BUILD) as aside:
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "wheel", "--no-deps", "--wheel-dir", aside, sdist, BALLONET_PARTS=str(parts))
        (plain,) = Path(aside).glob("*.whl")
        excluded = [f"--exclude=lib{name}.so" for name in LIBRARIES]  # they are those of the torch that is found
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        repaired = Path(aside) / "repaired"
        run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", repaired, plain, PATH=path)
        (wheel,) = repaired.glob("*.whl")
        return Path(shutil.move(wheel, into / wheel.name))


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
    pythons, said = choose_pythons(named or candidates())
    made = [make_sdist(DIST)]
    with tempfile.TemporaryDirectory(prefix="parts-", dir=BUILD) as parts:
        for version in asked.torch.replace("none", "").split():
            files, line = make_parts(version, BUILD / "torch-parts", installed_build())
            said.append(line)
            for file in files:
                shutil.copy(file, parts)
        for (major, minor), python in pythons.items():
            print(f"Python {major}.{minor}: compiling the core", flush=True)
            try:
                made.append(make_wheel(made[0], python, Path(parts), DIST))
            except subprocess.CalledProcessError as error:
                said.append(f"Python {major}.{minor}: its wheel cannot be made ({last_line(error)})")
    print(*(f"dist/{path.name}  {path.stat().st_size / 1e6:.1f} MB" for path in made), *said, sep="\n")
    print("any other torch: compiled at the first install(), which takes a C++ compiler")
    return int(len(made) <= len(pythons) or not pythons)


if __name__ == "__main__":
    sys.exit(main())
