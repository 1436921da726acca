"""The environment of `make test-cuda`: torch's CUDA build on the simulated device, beside the project's own `.venv`.

    python tests/simgpu/environment.py                  fetches and builds what is missing; prints the interpreter
    python tests/simgpu/environment.py --torch 2.15.0   the same with another torch, in an environment of its own
    python tests/simgpu/environment.py --present        the same, but fetches nothing

`.venv-cuda` holds torch's wheel without the NVIDIA libraries; all other packages are those of `.venv`, which comes
behind it on the path. Its `simgpu.pth` starts the device in each of its interpreters (simgpu_boot.py), so nothing
has to be set: `.venv-cuda/bin/python -m pytest tests/gpu` is enough. CUDA_VENV names another environment to use
instead, with SIMGPU_HOME set to build/simgpu. Exit status 3: torch is not there, and could not be fetched or was not
to be.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build

TORCH = "2.11.0"
ROOT = build.ROOT
BOOT = build.HERE / "simgpu_boot.py"
SOURCES = sorted((build.HERE / "torch").glob("*.cpp"))
HEADERS = [*(build.HERE / "torch").glob("*.h"), build.HERE / "device" / "simgpu.h"]
ABSENT = 3  # exit status: torch is not there, and was not to be fetched
# Of CUDA's headers torch's own need these; the libraries in the same wheels are left out.
WHEELS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
PTH = """\
import os, site; site.addsitedir({packages!r})
import os, sys; sys.path.append(os.environ.setdefault("SIMGPU_HOME", {home!r})); import simgpu_boot
"""


def folder(torch: str) -> Path:
    """The environment with that version of torch."""
    chosen = os.environ.get("CUDA_VENV")
    return Path(chosen) if chosen else ROOT / (".venv-cuda" if torch == TORCH else f".venv-cuda-{torch}")


def packages(environment: Path) -> Path:
    """The environment's site-packages."""
    return next(iter((environment / "lib").glob("python3*/site-packages")), environment / "absent")


def is_present(torch: str) -> bool:
    return (packages(folder(torch)) / "torch" / "lib" / "libtorch_cuda.so").exists()


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_NO_INPUT": "1"}, stdout=sys.stderr)


def fetch(torch: str) -> Path:
    """Makes the environment, 530 MB over the network the first time; returns its folder."""
    environment = folder(torch)
    if is_present(torch):
        return environment
    if not (environment / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    target = ("--python", environment / "bin" / "python")
    # === is that version and no other: a CPU build of pip's own sources, 2.13.0+cpu, would be taken for a newer one
    pip(*target, "install", "--no-deps", "--no-compile", "--progress-bar", "off", f"torch==={torch}")
    return environment


def cuda_headers() -> Path:
    """CUDA's headers: of a toolkit on this machine, else fetched (2 MB)."""
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root and (Path(root) / "include" / "cuda_runtime_api.h").exists():
            return Path(root) / "include"
    include = build.BUILD / "include"
    if not (include / "crt").exists():
        wheels = build.BUILD / "wheels"
        pip("download", "--no-deps", "--progress-bar", "off", "-d", wheels, *WHEELS)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if "/include/" in name and not name.endswith("/"):
                        target = include / name.split("/include/", 1)[1]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(name))
    return include


def compile_extension(torch: Path) -> Path:
    """The extension for that torch, build/simgpu/torch-VERSION/libsimgpu_torch.so; what is new enough stays."""
    version = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    assert version, f"{torch}: what version is it?"
    out = build.BUILD / f"torch-{version[1]}"
    out.mkdir(parents=True, exist_ok=True)
    made = {source: out / f"{source.stem}.o" for source in SOURCES}
    stale = [source for source, target in made.items() if build.newer(target, [source, *HEADERS])]
    library = out / "libsimgpu_torch.so"
    if not stale and library.exists():
        return library
    include = torch / "include"
    standard = "c++17" if int(version[1].split(".")[1]) < 13 else "c++20"
    where = [include, include / "torch" / "csrc" / "api" / "include", cuda_headers()]
    flags = [f"-std={standard}", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w", *(f"-I{path}" for path in where)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: build.run(build.CXX, *flags, "-c", source, "-o", made[source]), stale))
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    fresh = library.with_suffix(".new")
    build.run(build.CXX, "-shared", "-Wl,--allow-shlib-undefined", "-o", fresh, *made.values(), *libraries)
    fresh.replace(library)
    return library


def prepare(environment: Path) -> Path:
    """Builds the device, the stubs and the extension for it; returns its interpreter."""
    torch = packages(environment) / "torch"
    build.build_device()
    build.run(sys.executable, build.HERE / "stubs" / "generate.py", torch, build.BUILD)
    compile_extension(torch)
    shutil.copyfile(BOOT, build.BUILD / BOOT.name)
    pth = packages(environment) / "simgpu.pth"
    if not pth.exists():
        pth.write_text(PTH.format(packages=str(packages(Path(sys.prefix))), home=str(build.BUILD)))
    return environment / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=TORCH)
    parser.add_argument("--present", action="store_true")
    chosen = parser.parse_args()
    there = is_present(chosen.torch)
    if chosen.present and not there:
        return ABSENT
    try:
        environment = fetch(chosen.torch)
    except subprocess.CalledProcessError as error:
        print(f"torch=={chosen.torch} could not be fetched: {error}", file=sys.stderr)
        return ABSENT
    print(prepare(environment), "was there" if there else "was fetched")
    return 0


if __name__ == "__main__":
    sys.exit(main())
