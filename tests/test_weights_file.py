"""What a safetensors file says of itself is believed only where all of it fits, and only while nobody changes it."""

from __future__ import annotations

import copy
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ballonet.allocator.errors import BallonetError, WeightsFileChanged, WeightsFileError
from ballonet.offload.residency import weights_file
from ballonet.offload.residency.weights_file import LONGEST_HEADER, WeightsFile, read_header

from . import weights

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16]


def test_every_tensor_of_a_real_file_is_where_the_format_s_own_reader_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shapes: list[tuple[int, ...]] = [(), (3,), (5, 7), (0, 4), (2, 1, 3)]
    tensors = {f"{n}.{i}": torch.rand(s).mul(9).to(d) for n, d in enumerate(DTYPES) for i, s in enumerate(shapes)}
    save_file(tensors, path, {"format": "pt"})
    file = WeightsFile(path)
    with safe_open(path, "pt") as reader:
        assert set(file.tensors) == set(reader.keys()) == set(tensors)
        for name in tensors:
            span, entry, theirs = file.span(name), file.tensors[name], reader.get_slice(name)
            assert (entry.dtype, entry.shape) == (theirs.get_dtype(), tuple(theirs.get_shape()))
            mine = bytearray(file.read(span.start, span.nbytes) or b"?")
            flat = reader.get_tensor(name).reshape(-1).view(torch.uint8)
            assert span.nbytes == flat.numel()
            assert torch.equal(torch.frombuffer(mine, dtype=torch.uint8)[: span.nbytes], flat)


def read(data: bytes) -> Any:
    return read_header("file", len(data), lambda offset, nbytes: data[offset : offset + nbytes])


GOOD = weights.header({"a": 40, "b": 7})


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    rows: dict[str, Any] = copy.deepcopy(GOOD)
    change(rows)
    return weights.encoded(rows) + bytes(47)


DAMAGED = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no header": (0).to_bytes(8, "little"),
    "longer than the file": (10**6).to_bytes(8, "little") + b"{}",
    "longer than allowed": (LONGEST_HEADER + 1).to_bytes(8, "little") + bytes(64),
    "a number": weights.encoded(3),
    "a list": weights.encoded([]),
    "not json": (4).to_bytes(8, "little") + b"{{{{",
    "not text": (4).to_bytes(8, "little") + b"\xff\xfe{}",
    "deep": (20_000).to_bytes(8, "little") + b"[" * 20_000,
    "twice": (lambda text: len(text).to_bytes(8, "little") + text + bytes(47))(
        (json.dumps(GOOD)[:-1] + ', "a"' + json.dumps(GOOD).partition('"a"')[2]).encode()
    ),
    "cut off": weights.encoded(GOOD) + bytes(46),
    "too long": weights.encoded(GOOD) + bytes(48),
    "unknown dtype": changed(lambda rows: rows["a"].update(dtype="F7")),
    "list for a dtype": changed(lambda rows: rows["a"].update(dtype=[])),
    "negative size": changed(lambda rows: rows["a"].update(shape=[-8, -5])),
    "half a row": changed(lambda rows: rows["a"].update(shape=[2.5, 16])),
    "true rows": changed(lambda rows: rows["a"].update(shape=[True, 40])),
    "text for a shape": changed(lambda rows: rows["a"].update(shape="40")),
    "other size": changed(lambda rows: rows["a"].update(shape=[39])),
    "no shape": changed(lambda rows: rows["a"].pop("shape")),
    "one offset": changed(lambda rows: rows["a"].update(data_offsets=[0])),
    "overlap": changed(lambda rows: rows["b"].update(data_offsets=[33, 40])),
    "overlap within": changed(lambda rows: rows["b"].update(shape=[40], data_offsets=[7, 47])),
    "hole": changed(lambda rows: rows["b"].update(data_offsets=[48, 55])),
    "backwards": changed(lambda rows: rows["b"].update(data_offsets=[47, 40])),
    "negative offset": changed(lambda rows: rows["a"].update(data_offsets=[-40, 0])),
    "null": changed(lambda rows: rows.update(a=None)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_a_typed_error(data: bytes, tmp_path: Path) -> None:
    assert set(read(weights.encoded(GOOD) + bytes(47))) == {"a", "b"}
    with pytest.raises(WeightsFileError, match=r"^file: "):
        read(data)
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(WeightsFileError, match=str(tmp_path)):
        WeightsFile(tmp_path / "w")


@given(st.data())
def test_damaged_header_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(weights.encoded(GOOD) + bytes(47))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        entries = read(bytes(whole))
    except WeightsFileError:
        return
    assert all(0 < entry.start <= entry.end <= len(whole) for entry in entries.values())


def test_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "no file"),
        (tmp_path / "none", "cannot be opened"),
        (Path("/dev/zero"), "no file"),
    ):
        with pytest.raises(WeightsFileError, match=reason):
            WeightsFile(path)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("change", weights.CHANGES.values(), ids=weights.CHANGES)
def test_a_file_that_changed_is_a_typed_error(change: Callable[[Path], None], tmp_path: Path, fresh: bool) -> None:
    """The same where it was written so short a time ago that the next write is in the same tick of the clock."""
    path = weights.write(tmp_path / "w", {"a": 100})
    if fresh:
        os.utime(path)
    file = WeightsFile(path)
    file.check()
    change(path)
    said = {"replaced": "was replaced", "removed": "is gone"}.get(change.__name__, "was written to")
    uses: list[Callable[[], object]] = [file.check, lambda: file.read(0, 10), lambda: file.mapping]
    for use in uses:
        with pytest.raises(WeightsFileChanged, match=f"the file {said} .* load the model again"):
            use()
    assert isinstance(WeightsFileChanged("path", "reason"), BallonetError)


def test_a_file_that_loses_bytes_while_they_are_read_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at it came too early."""
    path = weights.write(tmp_path / "w", {"a": 10**5})
    file = WeightsFile(path)
    monkeypatch.setattr(WeightsFile, "check", lambda _: None)
    os.truncate(path, 5000)
    with pytest.raises(WeightsFileChanged, match="shorter"):
        file.read(4000, 2000)
    with pytest.raises(WeightsFileError, match="cannot be mapped"):
        _ = file.mapping


def test_a_file_that_was_just_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until another write would give it another time, on a system whose clock for files ticks every 10 ms."""
    path = weights.write(tmp_path / "w", {"a": 100})
    written = path.stat().st_mtime_ns
    now = written + 1_000_000

    def sleep(seconds: float) -> None:
        nonlocal now
        now += round(seconds * 1e9)

    monkeypatch.setattr(weights_file.time, "time_ns", lambda: now)
    monkeypatch.setattr(weights_file.time, "sleep", sleep)
    WeightsFile(path)
    assert written + 10_000_000 < now < written + 10**9


def test_old_or_future_time_of_a_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = weights.write(tmp_path / "w", {"a": 100})
    monkeypatch.setattr(weights_file.time, "sleep", lambda _: pytest.fail("waits"))
    WeightsFile(path)
    os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    WeightsFile(path)


def descriptors(path: Path) -> int:
    return sum(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())


def test_closed_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 10**5})
    file = WeightsFile(path)
    mapping = file.mapping
    assert mapping is file.mapping
    assert bytes(mapping[-100:]) == path.read_bytes()[-100:]
    assert descriptors(path) == 2
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path)))
    assert line.split()[1] == "r--s"
    del file, mapping
    gc.collect()
    path.write_bytes(json.dumps({}).encode())
    with pytest.raises(WeightsFileError):
        WeightsFile(path)
    gc.collect()
    assert descriptors(path) == 0
    assert str(path) not in Path("/proc/self/maps").read_text()
