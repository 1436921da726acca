"""Builds the simulated device into build/simgpu/lib: libcuda.so.1 and libcudart.so.13.

    python tests/simgpu/build.py            the device
    python tests/simgpu/build.py --torch P  also stubs of the other NVIDIA libraries that the torch at P/lib imports

Only what changed is compiled. A C++17 compiler is all that is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "allocator" / "csrc"
STANDIN = CSRC / "standin"
BUILD = ROOT / "build" / "simgpu"
LIB = BUILD / "lib"
# of the stand-in: its memory, which this device shares
MEMORY = ["extents", "mappings", "memory", "registered", "results"]
CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
INCLUDE = [f"-I{path}" for path in (HERE / "device", STANDIN, CSRC)]


def newer(target: Path, sources: list[Path]) -> bool:
    """Whether the target is missing or older than one of its sources."""
    return not target.exists() or any(path.stat().st_mtime > target.stat().st_mtime for path in sources)


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: failed")


def objects(sources: list[Path]) -> list[Path]:
    """Compiles what is older than its source or any header."""
    headers = [*(HERE / "device").glob("*.h"), *STANDIN.glob("*.h"), CSRC / "driver" / "driver_abi.h", Path(__file__)]
    made = {BUILD / "obj" / f"{path.parent.name}-{path.stem}.o": path for path in sources}
    stale = [target for target, source in made.items() if newer(target, [source, *headers])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda target: run(CXX, *FLAGS, *INCLUDE, "-c", made[target], "-o", target), stale))
    return list(made)


def link(name: str, sources: list[Path], *options: object, needs: list[Path] | None = None) -> Path:
    """`needs`: other files that the library is older than where they changed."""
    target, parts = LIB / name, objects(sources)
    if newer(target, [*parts, *(needs or []), Path(__file__)]):
        fresh = target.with_suffix(".new")  # moved in place whole: others may be loading it
        run(CXX, "-shared", "-pthread", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", "-o", fresh, *parts, *options)
        fresh.replace(target)
    return target


def build_device() -> Path:
    """libcuda.so.1 and libcudart.so.13; returns their folder."""
    for folder in (BUILD / "obj", LIB):
        folder.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        device = sorted((HERE / "device").glob("*.cpp"))
        runtime = [path for path in device if path.stem.startswith("runtime")]
        driver = [path for path in device if path not in runtime]
        cuda = link("libcuda.so.1", [*driver, *(STANDIN / f"{name}.cpp" for name in MEMORY)], "-ldl")
        versions = HERE / "device" / "cudart.map"
        script = f"-Wl,--version-script={versions}"
        link("libcudart.so.13", runtime, cuda, "-ldl", script, needs=[cuda, versions])
    return LIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=Path, help="the folder `torch` of a CUDA build of torch")
    chosen = parser.parse_args()
    build_device()
    if chosen.torch:
        run(sys.executable, HERE / "stubs" / "generate.py", chosen.torch, BUILD)
    print(LIB)


if __name__ == "__main__":
    main()
