"""Which weights of a model lie in the files they were loaded from, byte for byte.

Names say where to look, bytes decide: transformers may rename, convert or merge weights while it loads them, and they
may have been changed since. A tensor that was not loaded from a safetensors file on this machine, or does not equal the
file's bytes, is left out with the reason.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import nn

from ...allocator.errors import WeightsFileError
from ...offload.residency.weights_file import FileSpan, TensorEntry, WeightsFile
from ..compat import checkpoint_folder, loaded_names
from .mapped import file_spans, same
from .storages import has_bytes, members

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

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
