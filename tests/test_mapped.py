"""Which tensors are views of files, told by their addresses: right byte for byte, and nothing is read to find out."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ballonet.allocator.errors import WeightsFileChanged
from ballonet.hooks.weights import files
from ballonet.hooks.weights.files import Mapped, file_spans
from ballonet.hooks.weights.model_parts import TensorMember, members
from ballonet.offload.residency.weights_file import FileSpan, WeightsFile

from . import weights
from .models import build
from .portrait import bits

MAPS = """\
55d0c0e00000-55d0c0e21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000002000 rw-p 00000000 08:01 77                         /models/a b/model.safetensors
7f0000002000-7f0000003000 r--p 00002000 08:01 77                         /models/a b/model.safetensors
7f0000003000-7f0000004000 rw-p 00000000 08:01 77                         /models/a b/model.safetensors
7f0000004000-7f0000005000 rw-p 00000000 08:01 78                         /models/new\\012line
7f0000006000-7f0000007000 rw-p 00000000 00:05 12                         /dev/shm/model.safetensors (deleted)
7f0000007000-7f0000008000 rw-s 00000000 00:05 12                         /memfd:pages (deleted)
7f0000008000-7f0000009000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                          [vdso]
"""


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Views of a file, each of 64 KiB."""
    path = tmp_path / "some.safetensors"
    save_file({name: torch.randn(128, 128) for name in ("a", "b", "c", "d")}, path)
    opened = safe_open(path, framework="pt")
    return {name: opened.get_slice(name)[...] for name in ("a", "b", "c", "d")}


def found(*tensors: torch.Tensor) -> list[FileSpan | None]:
    spans = file_spans(TensorMember(str(n), tensor, {None}) for n, tensor in enumerate(tensors))
    assert spans.keys() <= {id(tensor) for tensor in tensors}
    return [spans.get(id(tensor)) for tensor in tensors]


def shows(span: FileSpan | None, tensor: torch.Tensor) -> bool:
    """Does the file hold there what is in the tensor's memory? Read by other means."""
    if span is None:
        return False
    data = Path(span.file.path).read_bytes()[span.start : span.start + span.nbytes]
    return data == ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def loaded(folder: Path, name: str = "llama", shard: str = "1GB", **changes: Any) -> Any:
    build(name, **changes).save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_kernel_s_list_is_understood() -> None:
    assert files.mapped(MAPS) == [
        Mapped(0x7F0000000000, 0x7F0000003000, 0, "/models/a b/model.safetensors"),
        Mapped(0x7F0000003000, 0x7F0000004000, 0, "/models/a b/model.safetensors"),
        Mapped(0x7F0000004000, 0x7F0000005000, 0, "/models/new\nline"),
        Mapped(0x7F0000006000, 0x7F0000007000, 0, "/dev/shm/model.safetensors (deleted)"),
    ]


@pytest.mark.parametrize(("name", "shard"), [("llama", "100KB"), ("bloom", "1GB")])
def test_every_weight_of_a_loaded_model(tmp_path: Path, name: str, shard: str) -> None:
    model = loaded(tmp_path, name, shard, tie_word_embeddings=True)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard != "1GB")
    spans = file_spans(members(model, ()))
    stored = {id(tensor) for _, tensor in model.state_dict(keep_vars=True).items()}
    assert spans.keys() == stored
    named = {id(member.tensor): member.tensor for member in members(model, ())}
    assert all(shows(span, named[key]) for key, span in spans.items())


def test_converted_weight_is_no_view(tmp_path: Path) -> None:
    model = loaded(tmp_path, "mixtral")
    spans = file_spans(members(model, ()))
    missing = {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in spans}
    assert len(missing) == 2 * model.config.num_hidden_layers
    assert all("experts" in name for name in missing)


def test_parts_and_turned_views_are_where_they_are(tensors: dict[str, torch.Tensor]) -> None:
    whole = tensors["b"]
    first, second = whole.chunk(2)
    turned = whole.t()
    spans = found(first, second, turned, whole)
    assert all(map(shows, spans, (first, second, turned, whole)))
    assert spans[1].start - spans[0].start == first.nbytes  # type: ignore[union-attr]
    assert spans[0].file is spans[3].file  # type: ignore[union-attr]


def test_tensor_with_gaps_is_no_view(tensors: dict[str, torch.Tensor]) -> None:
    a = tensors["a"]
    own = (a.clone(), torch.empty(4, device="meta"), torch.empty(0))
    gaps = (*own, a[:, :64], a[::2], a.as_strided((64, 128), (64, 1)), a[:0], a._neg_view(), a.expand(2, 128, 128))
    assert found(*gaps) == [None] * len(gaps)
    assert all(shows(*pair) for pair in zip(found(a[:, None], a[3], a[3, 4]), (a[:, None], a[3], a[3, 4]), strict=True))


@pytest.mark.parametrize("kernel", ["tells", "tells nothing"])
def test_tensor_written_since_is_no_view(
    tensors: dict[str, torch.Tensor], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours of it, on a page that is not the file's any more, are."""
    if kernel == "tells nothing":
        pread = os.pread

        def refuse(descriptor: int, nbytes: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("pagemap"):
                raise PermissionError
            return pread(descriptor, nbytes, offset)

        monkeypatch.setattr(os, "pread", refuse)
    order = sorted(tensors.values(), key=torch.Tensor.data_ptr)
    order[1][0, 0] += 1
    order[3][0, 0].copy_(order[3][0, 0].clone())  # to what it was
    spans = found(*order)
    assert order[1].data_ptr() % mmap.PAGESIZE  # the one before it ends on the same page
    assert spans.pop(1) is None
    order.pop(1)
    assert all(map(shows, spans, order))
    assert found(order[2].t()) != [None]


def test_finding_views_reads_only_the_header(tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = WeightsFile.read, []

    def noted(file: WeightsFile, offset: int, nbytes: int) -> bytes:
        reads.append((offset, nbytes))
        return read(file, offset, nbytes)

    monkeypatch.setattr(WeightsFile, "read", noted)
    spans = found(*tensors.values())
    assert None not in spans
    assert reads == [(0, min(span.start for span in spans if span))]  # the header, to see whether it is the file


@pytest.mark.parametrize("gone", [False, True])
def test_a_mapped_file_of_another_format_is_none(tmp_path: Path, gone: bool) -> None:
    path = tmp_path / "weights.bin"
    torch.save({"a": torch.randn(4096)}, path)
    (tensor,) = torch.load(path, mmap=True).values()
    if gone:
        path.unlink()
    assert any(str(path) in file.path for file in files.mapped(Path("/proc/self/maps").read_text()))
    assert found(tensor) == [None]


@pytest.mark.parametrize("change", ["emptied", "halved", "longer"])
def test_a_file_that_is_not_what_was_mapped(tmp_path: Path, change: str, tensors: dict[str, torch.Tensor]) -> None:
    weights.CHANGES[change](tmp_path / "some.safetensors")
    with pytest.raises(WeightsFileChanged, match=r"some\.safetensors: .*load the model again"):
        found(*tensors.values())


def test_a_path_that_leads_to_another_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another file system was mounted over it. What is mapped is what it was."""
    other = tmp_path / "other.safetensors"
    save_file({name: torch.randn(64, 256) for name in ("a", "b", "c", "d")}, other)
    listed = [replace(file, path=str(other)) for file in files.mapped(Path("/proc/self/maps").read_text())]
    monkeypatch.setattr(files, "mapped", lambda _: listed)
    assert found(*tensors.values()) == [None] * 4


def test_a_file_that_is_gone(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights.removed(tmp_path / "some.safetensors")
    assert found(*tensors.values()) == [None] * 4


def test_a_file_that_was_moved_away_is_found_where_it_is_now(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    before = bits(tensors["c"])
    weights.replaced(tmp_path / "some.safetensors")
    save_file({name: torch.zeros(128, 128) for name in ("a", "b", "c", "d")}, tmp_path / "some.safetensors")
    (span,) = found(tensors["c"])
    assert span is not None
    assert span.file.path == str(tmp_path / "some.old")
    assert shows(span, tensors["c"])
    assert before == bits(tensors["c"])
