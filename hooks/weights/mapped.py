"""Which tensors of a model are views of the files that they were loaded from, told by their addresses.

Note [Views of a file]
    transformers maps the files of a model and hands out views of them, on the CPU and as long as nothing has to be
    converted. The address in the mapping says where in the file a tensor's bytes lie, whatever its name is by then: a
    renamed weight, one of two names, a part of a fused one. No byte is read to find that out. The mapping is private,
    so a page that was written to belongs to the process (the kernel counts them): tensors on such a mapping are
    compared with the file, and those that differ are not views of it.
"""

from __future__ import annotations

import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch

from ...allocator.errors import WeightsFileChanged, WeightsFileError
from ...offload.policy.tuning import DEFAULT
from ...offload.residency.weights_file import LONGEST_HEADER, FileSpan, WeightsFile
from .storages import TensorMember, has_bytes

_LINE: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ [1-9]\d* +(/(?!memfd:).*)$", re.MULTILINE)
_PAGE: Final = mmap.PAGESIZE
_ENTRY: Final = 8  # bytes that /proc/self/pagemap has for each page
_PRESENT, _SWAPPED, _OF_FILE = (1 << bit for bit in (63, 62, 61))


@dataclass(frozen=True, slots=True)
class Mapped:
    """Addresses [first, end) that show the file at `path` from `offset` on."""

    first: int
    end: int
    offset: int
    path: str


def mapped(text: str) -> list[Mapped]:
    """The mapped files in a text like /proc/self/maps, by address; joins mappings that the kernel has split."""
    files: list[Mapped] = []
    for line in _LINE.finditer(text):
        first, end, offset, path = int(line[1], 16), int(line[2], 16), int(line[3], 16), line[4].replace("\\012", "\n")
        if files and (last := files[-1]).path == path and last.end == first == last.first + offset - last.offset:
            files[-1] = Mapped(last.first, end, last.offset, path)
        else:
            files.append(Mapped(first, end, offset, path))
    return files


def file_spans(given: Iterable[TensorMember]) -> dict[int, FileSpan]:
    """Returns, by the id of a tensor, its bytes in the safetensors file that it is a view of. Other tensors are left
    out, as are those that do not use every byte between their first and last.

    WeightsFileChanged where a file is not the mapped one any more, so that the mapping must not be touched.
    """
    maps = mapped(Path("/proc/self/maps").read_text())
    views: dict[Mapped, list[torch.Tensor]] = {}
    for member in given:
        tensor = member.tensor
        if tensor.device.type == "cpu" and has_bytes(tensor) and _dense(tensor):
            n = bisect_right(maps, tensor.data_ptr(), key=lambda it: it.first) - 1
            if n >= 0 and tensor.data_ptr() + tensor.nbytes <= maps[n].end:
                views.setdefault(maps[n], []).append(tensor)
    spans: dict[int, FileSpan] = {}
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for place, tensors in views.items():
            file = _opened(place, tensors, memory)
            if file is not None:
                for tensor in tensors:
                    span = FileSpan(file, tensor.data_ptr() - place.first, tensor.nbytes)
                    if not _may_be_written(tensor) or same(_in_order(tensor), span, memory):
                        spans[id(tensor)] = span
    return spans


def _dense(tensor: torch.Tensor) -> bool:
    """Does the tensor use every byte from its first to its last, with no conjugation or negation?"""
    reached = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != reached:
                return False
            reached *= size
    return not tensor.is_conj() and not tensor.is_neg()


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _opened(place: Mapped, tensors: Iterable[torch.Tensor], memory: BinaryIO) -> WeightsFile | None:
    """Opens the mapped file; None where it is no safetensors file, or was removed, so that the mapping cannot change.
    WeightsFileChanged."""
    try:
        length = int.from_bytes(os.pread(memory.fileno(), 8, place.first), "little")
        if place.offset or not 2 <= length <= min(LONGEST_HEADER, place.end - place.first - 8):
            return None
        header = os.pread(memory.fileno(), 8 + length, place.first)
    except OSError as error:  # the file was cut short
        raise _changed(place.path, "became shorter") from error
    if not header[8:].startswith(b"{") or not os.path.exists(place.path):
        return None
    if os.stat(place.path).st_size < max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - place.first:
        raise _changed(place.path, "became shorter")
    try:
        file = WeightsFile(place.path)
        return file if file.read(0, len(header)) == header else None
    except WeightsFileError as error:
        raise _changed(place.path, "was written to") from error


def _changed(path: str, what: str) -> WeightsFileChanged:
    return WeightsFileChanged(path, f"the file {what} while a model was being loaded from it: load the model again")


def _may_be_written(tensor: torch.Tensor) -> bool:
    """Were pages under the tensor written to, so that they are not the file's? True where the kernel does not tell."""
    first = tensor.data_ptr() // _PAGE
    pages = -(-(tensor.data_ptr() + tensor.nbytes) // _PAGE) - first
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as entries:
            data = os.pread(entries.fileno(), pages * _ENTRY, first * _ENTRY)
    except OSError:
        return True
    bits = np.frombuffer(data, np.uint64)
    own = (bits & (_PRESENT | _OF_FILE)) == _PRESENT
    return len(bits) < pages or bool((own | ((bits & _SWAPPED) != 0)).any())


def same(
    tensor: torch.Tensor,
    span: FileSpan,
    memory: BinaryIO,
    told: Callable[[], object] = lambda: None,
    most: int = DEFAULT.files.compared,
) -> bool:
    """Does the tensor equal the file, byte for byte? `memory`: /proc/self/mem. `told` is called after each `most`
    bytes. WeightsFileChanged.

    On the CPU a tensor may itself be a view of the mapped file, so its bytes are read without touching them, too.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for first in range(0, span.nbytes, most):
        nbytes = min(most, span.nbytes - first)
        data = span.file.read(span.start + first, nbytes)
        if flat.device.type == "cpu":
            try:
                equal = data == os.pread(memory.fileno(), nbytes, flat.data_ptr() + first)
            except OSError:  # the file was cut short
                equal = False
        else:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(flat.device)
            equal = torch.equal(sent, flat[first : first + nbytes])
        told()
        if not equal:
            return False
    return True
