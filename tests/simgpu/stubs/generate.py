"""Stubs of the NVIDIA libraries that a CUDA build of torch links: enough to load it where none of them is installed.

    python tests/simgpu/stubs/generate.py TORCH BUILD    into BUILD/lib; TORCH is the folder of the package

What torch imports is read from its own libraries. A stub's function sets up, asks or tears down with success (0) and
refuses to compute: a result that nobody computed would be silently wrong. Several builds of torch may share the folder:
a stub has what any of them imports.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OURS = {"libcuda.so.1", "libcudart.so"}  # those that the device itself is
NVIDIA = re.compile(r"lib(cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvJitLink"
                    r"|nvrtc|nvshmem_host)\.so")  # fmt: skip
# whose symbols carry no version, or one that is not the SONAME: how they begin
PREFIXES = {"libcusparseLt": "cusparseLt", "libnccl": "nccl", "libnvshmem_host": "nvshmem", "libcufile": "cuFile"}
HARMLESS = re.compile(r"^(cupti|cuFile)|Create|Destroy|Init|Set|Get|Version|Finalize|Register|Query|Free|Barrier|Is")
TEXT = re.compile(r"(Error|Status|Result|Last)\w*(String|Name|Error)$")
ANSWERS = {"cudnnGetVersion": "92900", "nvrtcCreateProgram": "7", "nvrtcCompileProgram": "7"}
NOT_SUPPORTED = 15
NOTHING = "the simulated device computes nothing with this library"


def output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def imports(torch: Path) -> dict[str, set[tuple[str, str]]]:
    """SONAME -> (symbol, version) for every NVIDIA library that torch links; the version may be empty."""
    libraries = sorted((torch / "lib").glob("*.so"))
    needed = {name for path in libraries for name in re.findall(r"NEEDED\s+(\S+)", output("objdump", "-p", path))}
    sonames = {name for name in needed if NVIDIA.match(name)}
    symbols: dict[str, set[tuple[str, str]]] = {name: set() for name in sonames}
    for symbol, version in re.findall(
        r" U (\w+)(?:@(\S+))?$", output("nm", "-D", "--undefined-only", "--with-symbol-versions", *libraries), re.M
    ):
        if version in sonames:
            symbols[version].add((symbol, version))
            continue
        for name in sonames:
            prefix = PREFIXES.get(name.split(".so")[0])
            if prefix and symbol.startswith(prefix):
                symbols[name].add((symbol, version))
    return symbols


def source(symbols: set[tuple[str, str]]) -> str:
    lines = ["/* made by tests/simgpu/stubs/generate.py */"]
    for symbol, _ in sorted(symbols):
        if TEXT.search(symbol):
            lines.append(f'const char* {symbol}(void) {{ return "{NOTHING}"; }}')
        else:
            answer = ANSWERS.get(symbol) or ("0" if HARMLESS.search(symbol) else str(NOT_SUPPORTED))
            lines.append(f"long {symbol}(void) {{ return {answer}; }}")
    return "\n".join(lines) + "\n"


def versions(symbols: set[tuple[str, str]]) -> str:
    by_version = defaultdict(list)
    for symbol, version in sorted(symbols):
        if version:
            by_version[version].append(symbol)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in by_version.items())


def make(soname: str, symbols: set[tuple[str, str]], build: Path) -> None:
    """One library, unless it is there and has them all."""
    target, base = build / "lib" / soname, build / "stubs" / soname
    listed, code, script = (Path(f"{base}.{suffix}") for suffix in ("symbols", "c", "map"))
    before = {tuple(line.split(" ")) for line in listed.read_text().splitlines()} if listed.exists() else set()
    wanted = symbols | before
    if target.exists() and wanted == before and target.stat().st_mtime > Path(__file__).stat().st_mtime:
        return
    code.write_text(source(wanted))
    script.write_text(versions(wanted))
    versioned = [f"-Wl,--version-script={script}"] if script.read_text() else []
    compiler = os.environ.get("CC", "gcc")
    fresh = target.with_name(target.name + ".new")
    output(compiler, "-w", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{soname}", *versioned, "-o", fresh, code)
    fresh.replace(target)
    listed.write_text("".join(f"{symbol} {version}\n" for symbol, version in sorted(wanted)))


def generate(torch: Path, build: Path) -> list[str]:
    """Makes the stubs; returns their names."""
    for folder in ("lib", "stubs"):
        (build / folder).mkdir(parents=True, exist_ok=True)
    symbols = imports(torch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: make(*item, build), symbols.items()))
    return sorted(symbols)


if __name__ == "__main__":
    print(*generate(Path(sys.argv[1]), Path(sys.argv[2])))
