"""Starts the simulated device in a Python process whose torch is built for CUDA.

`environment.py` copies this file to build/simgpu, beside the libraries, and names it in the environment's `simgpu.pth`,
so that every interpreter of the environment imports it first. The libraries are loaded by path: whoever asks for
`libcuda.so.1` or `libcudart.so.13` later, torch's own libraries among them, gets them by their SONAME.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
EXTENSION = "libsimgpu_torch.so"
FIRST = ("libcuda.so.1", "libcudart.so.13")  # the others, which do nothing, are loaded in any order


class Follow(importlib.abc.MetaPathFinder):
    """Loads the extension right after torch has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # some only ask where torch is
        if spec is not None and spec.loader is not None:
            execute: Any = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                module.ops.load_library(str(HERE / f"torch-{module.__version__}" / EXTENSION))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def start() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker of a stream computes alone
    libraries = HERE / "lib"
    others = sorted(path.name for path in libraries.glob("lib*.so*") if path.name not in FIRST)
    for name in (*FIRST, *others):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, Follow())


start()
