"""Which weights of a model lie in the files they were loaded from, byte for byte.

Names say where to look, bytes decide: transformers may rename, convert or merge weights while it loads them, and anyone
may have changed them since. A tensor that was not loaded from a file of safetensors on this machine, or is not what
that file holds, is left out with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import nn

from ..allocator.errors import WeightsFileError
from ..offload.safetensors import Entry
from ..offload.weights_file import FileSpan, WeightsFile
from .compat import checkpoint_folder, loaded_names
from .storages import has_bytes, members

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CHUNK: Final = 4 * 2**20  # bytes compared at a time

_DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """`spans`: name of a tensor, as `members` has it -> its bytes in a file. `left`: name of any other -> why."""

    spans: Mapping[str, FileSpan]
    left: Mapping[str, str]


def find(model: nn.Module) -> Found:
    """Looks for every parameter and buffer of `model`, and compares what is found with the file.

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
            possible = named.get(id(tensor), ())
            if not possible:
                left[member.name] = broken or (
                    "no file has it" if files else "no file that it was loaded from is known"
                )
            elif not has_bytes(tensor) or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                left[member.name] = "its memory is not laid out as in the file"
            elif not (alike := [span for entry, span in possible if _alike(tensor, entry)]):
                left[member.name] = "its dtype or shape is not that in the file"
            elif (same := next((span for span in alike if _same(tensor, span, memory)), None)) is None:
                left[member.name] = "its values are not those in the file"
            else:
                spans[member.name] = same
    for file in files:  # nothing changed under the last comparisons
        file.check()
    return Found(spans, left)


def candidates(model: nn.Module, files: list[WeightsFile]) -> dict[int, list[tuple[Entry, FileSpan]]]:
    """By the id of a parameter or buffer: what the files hold under any name that it was loaded by."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    found: dict[int, list[tuple[Entry, FileSpan]]] = {}
    for file in files:
        for key, name in loaded_names(model, file.tensors).items():
            found.setdefault(id(tensors[name]), []).append((file.tensors[key], file.span(key)))
    return found


def _files(model: nn.Module) -> tuple[list[WeightsFile], str]:
    """The files that `from_pretrained` reads, and why one of them cannot be used, else empty."""
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


def _alike(tensor: torch.Tensor, entry: Entry) -> bool:
    return _DTYPES.get(entry.dtype) == tensor.dtype and entry.shape == tuple(tensor.shape)


def _same(tensor: torch.Tensor, span: FileSpan, memory: BinaryIO) -> bool:
    """Does the file hold what the tensor holds?

    On the CPU a tensor may itself be a view of the mapped file, so its bytes are read without touching them, too.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for first in range(0, span.nbytes, CHUNK):
        nbytes = min(CHUNK, span.nbytes - first)
        data = span.file.read(span.start + first, nbytes)
        if flat.device.type == "cpu":
            try:
                equal = data == os.pread(memory.fileno(), nbytes, flat.data_ptr() + first)
            except OSError:  # there is nothing behind it any more
                equal = False
        else:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(flat.device)
            equal = torch.equal(sent, flat[first : first + nbytes])
        if not equal:
            return False
    return True
