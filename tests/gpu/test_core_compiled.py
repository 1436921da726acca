"""The allocator that is compiled for the torch found here: with which headers, and what there is without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ballonet.allocator import companion, cuda_headers
from ballonet.allocator.trusted import TrustedFolder

pytestmark = pytest.mark.gpu

# {change}: what is missing here. {warnings}: how often install() says so. {raised}: of memory that runs out.
WITHOUT = """
import warnings
import torch, ballonet
from ballonet.allocator import companion, cuda_headers, torch_parts
{change}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ballonet.install("256MiB")
said = [str(warning.message) for warning in caught]
assert sum({words!r} in each for each in said) == {warnings}, said
assert any("CUDA graphs work" in each for each in said), said
given = torch.full((1000,), 2.0, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    middle = given + 1
    address, out = middle.data_ptr(), middle * 2
    del middle
later = [torch.full((1000,), 7.0, device="cuda") for _ in range(50)]
assert address not in {{tensor.data_ptr() for tensor in later}}
graph.replay()
torch.cuda.synchronize()
assert out.eq(6).all().item() and all(tensor.eq(7).all().item() for tensor in later)
assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() > 0
torch.accelerator.empty_cache()
try:
    torch.empty(2**30, device="cuda")
except {raised} as error:
    assert "CUDA out of memory. Tried to allocate 4.00 GiB." in str(error), error
else:
    raise AssertionError("4 GiB of 256 MiB")
"""
NO_COMPILER = 'torch_parts.COMPILERS = ("no-such-compiler",)'
NO_HEADERS = "cuda_headers.folders = lambda: iter(())"
CANNOT_COMPILE = """
import dataclasses
companion.TORCH_ALLOCATOR = dataclasses.replace(companion.TORCH_ALLOCATOR, libraries=("no-such-library",))
"""
OUT_OF_MEMORY = "torch.OutOfMemoryError"


@pytest.mark.parametrize(
    ("change", "words", "warnings", "raised"),
    [
        (NO_COMPILER, "no C++ compiler", 2, "RuntimeError"),
        (NO_HEADERS, "(cuda_runtime_api.h) are missing", 1, OUT_OF_MEMORY),
        (CANNOT_COMPILE, "cannot compile it", 1, OUT_OF_MEMORY),
    ],
    ids=["no compiler", "no headers", "cannot compile"],
)
def test_graphs_keep_their_memory_without_it(
    tmp_path: Path, change: str, words: str, warnings: int, raised: str
) -> None:
    program = WITHOUT.format(change=change, words=words, warnings=warnings, raised=raised)
    environment = os.environ | {"BALLONET_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_companion_compiles_with_the_headers_of_pips_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of pip's torch lack the folder crt/, which comes with nvcc."""
    cuda = torch.version.cuda
    assert cuda is not None
    there, missing = cuda_headers.find(cuda)
    assert there is not None, missing
    pips = tmp_path / "nvidia" / "cu13" / "include"
    pips.mkdir(parents=True)
    for header in there.iterdir():
        if header.name != "crt":
            (pips / header.name).symlink_to(header)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cuda_headers.find(cuda) == (pips, "")
    assert companion.build(TrustedFolder(tmp_path / "cache"), companion.TORCH_ALLOCATOR).path.is_file()
