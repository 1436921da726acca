"""Finds CUDA's headers, to compile against torch's CUDA libraries. Imports no torch.

pip's torch brings them (nvidia-cuda-runtime) without the folder crt/, of which `csrc/torch/crt` has what they need.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .config import cuda_homes

TOOLKIT: Final = Path("/usr/local/cuda")
PACKAGED: Final = ("nvidia/*/include", "triton/backends/nvidia/include")  # in a folder of packages
# What does not work where torch's CUDA allocator cannot be compiled (docs/torch-allocator.md).
WITHOUT: Final = (
    "memory snapshots and history, torch.cuda.MemPool(), memory fractions, the profiler's memory events and "
    'torch.compile(mode="reduce-overhead") raise an error or show nothing; CUDA graphs work'
)
_VERSION: Final = re.compile(r"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)


def folders() -> Iterator[Path]:
    """Yields the folders that may have them, the best first."""
    packaged, last = ([path for entry in sys.path for path in sorted(Path(entry).glob(name))] for name in PACKAGED)
    yield from packaged
    yield from (home / "include" for home in (*cuda_homes(), TOOLKIT))
    yield from last  # of the CUDA that triton was built with


def find(cuda: str) -> tuple[Path | None, str]:
    """Returns the folder with the headers of that version of CUDA ("13.0"; its first number decides), or None and what
    to do."""
    wanted, others = int(cuda.partition(".")[0]), []
    for folder in folders():
        major = _cuda_of(folder)
        if major == wanted:
            return folder, ""
        if major is not None:
            others.append(f"{folder} has those of CUDA {major}")
    package = "nvidia-cuda-runtime" + (f"-cu{wanted}" if wanted < 13 else f"=={wanted}.*")
    there = f" ({'; '.join(others)})" if others else ""
    return None, (
        f"the headers of CUDA {wanted} (cuda_runtime_api.h) are missing{there}: pip install '{package}', or set "
        "CUDA_HOME to a toolkit of that version"
    )


def _cuda_of(folder: Path) -> int | None:
    try:
        match = _VERSION.search((folder / "cuda_runtime_api.h").read_text(errors="replace"))
    except OSError:
        return None
    return int(match[1]) // 1000 if match else None
