"""Which weights of a model lie in the files they were loaded from, byte for byte: told by their addresses where they
are views of a file, else looked for by name and compared.

Names say where to look, bytes decide: transformers may rename, convert or merge weights while it loads them, and they
may have been changed since. A tensor that was not loaded from a safetensors file on this machine, or does not equal the
file's bytes, is left out with the reason.

Note [Views of a file]
    transformers maps the files of a model and hands out views of them, on the CPU and as long as nothing has to be
    converted. The address in the mapping says where in the file a tensor's bytes lie, whatever its name is by then: a
    renamed weight, one of two names, a part of a fused one. No byte is read to find that out. The mapping is private,
    so a page that was written to belongs to the process (the kernel counts them): tensors on such a mapping are
    compared with the file, and those that differ are not views of it.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch
from torch import nn

from ...allocator.errors import WeightsFileChanged, WeightsFileError
from ...offload.residency.weights_file import LONGEST_HEADER, FileSpan, TensorEntry, WeightsFile
from ..compat import checkpoint_folder, loaded_names
from .model_parts import TensorMember, has_bytes, members

_LINE: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ [1-9]\d* +(/(?!memfd:).*)$", re.MULTILINE)
_PAGE: Final = mmap.PAGESIZE
_ENTRY: Final = 8  # bytes that /proc/self/pagemap has for each page
_PRESENT, _SWAPPED, _OF_FILE = (1 << bit for bit in (63, 62, 61))
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


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
    most: int = 4 * 2**20,  # chosen: little beside a layer
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


@dataclass(frozen=True, slots=True)
class Found:
    """`spans`: name of a tensor, as `members` has it -> its bytes in a file. `left`: name of any other -> why."""

    spans: Mapping[str, FileSpan]
    left: Mapping[str, str]


def find(model: nn.Module, wanted: Collection[int] | None = None) -> Found:
    """Looks for every parameter and buffer of `model` in its files, and compares the bytes. `wanted`: ids of the only
    tensors to look for.

    Reads the files once, and on a GPU sends them there to be compared; nothing comes back. WeightsFileChanged where a
    file changes meanwhile.
    """
    files, broken = _files(model)
    named = candidates(model, files)
    spans: dict[str, FileSpan] = {}
    left: dict[str, str] = {}
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for member in members(model, ()):
            tensor = member.tensor
            if wanted is not None and id(tensor) not in wanted:
                continue
            possible = named.get(id(tensor), ())
            if not possible:
                left[member.name] = broken or (
                    "no file has it" if files else "no file that it was loaded from is known"
                )
            elif isinstance(result := compared(tensor, possible, memory), str):
                left[member.name] = result
            else:
                spans[member.name] = result
    for file in files:  # nothing changed under the last comparisons
        file.check()
    return Found(spans, left)


def compared(
    tensor: torch.Tensor,
    possible: Iterable[tuple[TensorEntry, FileSpan]],
    memory: BinaryIO,
    told: Callable[[], object] = lambda: None,
) -> FileSpan | str:
    """Returns which of the possible places equals the tensor byte for byte, else the reason why none does. `memory`,
    `told`: as for `same`. WeightsFileChanged."""
    if not has_bytes(tensor) or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return "its memory is not laid out as in the file"
    if not (alike := [span for entry, span in possible if _alike(tensor, entry)]):
        return "its dtype or shape is not that in the file"
    equal = next((span for span in alike if same(tensor, span, memory, told)), None)
    return "its values are not those in the file" if equal is None else equal


def possible_places(model: nn.Module) -> dict[int, list[tuple[TensorEntry, FileSpan]]]:
    """Returns, by the id of a parameter or buffer, its entries in the files that the model was loaded from, as far as
    those are known, under any name that it was loaded by. Compares no bytes, but reads every module's tensors."""
    return candidates(model, _files(model)[0])


def candidates(model: nn.Module, files: list[WeightsFile]) -> dict[int, list[tuple[TensorEntry, FileSpan]]]:
    """Returns, by the id of a parameter or buffer, its entries in `files` under any name that it was loaded by."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    entries: dict[int, list[tuple[TensorEntry, FileSpan]]] = {}
    for file in files:
        for key, name in loaded_names(model, file.tensors).items():
            entries.setdefault(id(tensors[name]), []).append((file.tensors[key], file.span(key)))
    return entries


def _files(model: nn.Module) -> tuple[list[WeightsFile], str]:
    """Returns the files that `from_pretrained` reads, and the reason why one cannot be used, else empty."""
    folder = checkpoint_folder(model)
    opened, broken = [], ""
    for path in () if folder is None else _paths(folder):
        try:
            opened.append(WeightsFile(path))
        except WeightsFileError as error:
            broken = str(error)
    return opened, broken


def _paths(folder: Path) -> Iterator[Path]:
    if (folder / SINGLE).exists():
        yield folder / SINGLE
        return
    try:
        names = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    yield from (folder / name for name in dict.fromkeys(names) if isinstance(name, str))


def _alike(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    return _DTYPES.get(entry.dtype) == tensor.dtype and entry.shape == tuple(tensor.shape)


def finder(model: weakref.ref[nn.Module]) -> Callable[[Set[int]], dict[int, FileSpan]]:
    """Returns a function from ids of tensors to their places in files: known from the address for views of a file, else
    looked for and compared."""

    def find_them(ids: Set[int]) -> dict[int, FileSpan]:
        alive = model()
        if alive is None:
            return {}
        wanted = {member.name: member for member in members(alive, ()) if id(member.tensor) in ids}
        places = file_spans(wanted.values())
        rest = ids - places.keys()
        if rest and checkpoint_folder(alive) is not None:
            places |= {id(wanted[name].tensor): span for name, span in find(alive, rest).spans.items()}
        return places

    return find_them
