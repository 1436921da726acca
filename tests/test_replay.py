"""Recorded traces: what is read, what is refused and where, and how much memory a trace needs."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ballonet.allocator import defaults
from ballonet.allocator.config import Config, format_size
from ballonet.allocator.errors import TraceError
from ballonet.allocator.replay import pack, replay

KEYS = {"peak_live", "peak_physical", "driver_calls", "ns_per_op", "ops"}
HEADER = "time_us,op,id,size,stream"
RECORDED = sorted((Path(__file__).parents[2] / "shared" / "data" / "alloc").glob("*.csv"))
MIB = 2**20
PAGE_SIZES = sorted({2 * MIB, defaults.PAGE_SIZE["standin"]})
Trace = Callable[[str], Path]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    def write(text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode())
        return path

    return write


def rows(packed: bytes) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<B7xQQQ", packed))


def lines(ops: Sequence[tuple[str, int, int]]) -> str:
    return "\n".join([HEADER, *(f"{i},{op},{block},{size},0" for i, (op, block, size) in enumerate(ops))])


def test_allocations_and_their_frees_are_packed_in_order(trace: Trace) -> None:
    """An id may come back after its free; other operations, and frees of older blocks, are skipped."""
    path = trace(
        f"{HEADER}\n0,segment_alloc,x,,\n0,free,8,64,0\n0,free,-1,64,0\n0,alloc,7,100,0\n1,alloc,8,4096,3\n"
        "2,free,7,100,0\n3,free,8,4096,3\n3,snapshot,,,\n4,alloc,7,16,0\n"
    )
    assert rows(pack(path)) == [(1, 7, 100, 0), (1, 8, 4096, 3), (2, 7, 0, 0), (2, 8, 0, 3), (1, 7, 16, 0)]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + HEADER + "\n0,alloc,1,8,0\n",
        HEADER + "\r\n0,alloc,1,8,0\r\n",
        HEADER + "\n\n0,alloc,1,8,0\n\n",
        "stream,note,size,id,op,time_us\n0,hello,8,1,alloc,0.5\n",
        ' time_us , op ,id,size,stream\n"0", alloc , 1 ,8, 0\n',
        HEADER + "\n0,alloc,1,8,0",
    ],
    ids=["byte order mark", "CRLF", "empty lines", "other columns", "spaces and quotes", "no last newline"],
)
def test_variants_of_the_format(trace: Trace, text: str) -> None:
    assert rows(pack(trace(text))) == [(1, 1, 8, 0)]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "no column time_us, op, id, size, stream"),
        ("time_us,op,id,stream\n", 1, "no column size"),
        (HEADER + "\n0,alloc,1,8\n", 2, "4 fields where the header has 5"),
        (HEADER + "\n0,alloc,1,8,0\n1,alloc,1,8,0\n", 3, "id 1 is allocated again"),
        (HEADER + "\n0,alloc,1,8,0\n1,free,1,8,0\n2,free,1,8,0\n", 4, "id 1 is freed a second time"),
        (HEADER + "\n0,alloc,1,-8,0\n", 2, "size is '-8'"),
        (HEADER + "\n0,alloc,1,8.5,0\n", 2, "size is '8.5'"),
        (HEADER + "\n0,alloc,1,0,0\n", 2, "size is 0"),
        (HEADER + "\n0,alloc,1,99999999999999999999,0\n", 2, "size is"),
        (HEADER + "\n0,alloc,x,8,0\n", 2, "id is 'x'"),
        (HEADER + "\n0,free,,8,0\n", 2, "id is ''"),
        (HEADER + "\n0,alloc,1,8,main\n", 2, "stream is 'main'"),
        (HEADER + "\nsoon,alloc,1,8,0\n", 2, "time_us is 'soon'"),
        (HEADER + '\n0,alloc,1,8,0\n1,"alloc,2,8,0\n', 3, "not a CSV file"),
    ],
)
def test_damage_is_named_with_its_line(trace: Trace, text: str, line: int, reason: str) -> None:
    path = trace(text)
    with pytest.raises(TraceError) as caught:
        pack(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert reason in str(caught.value)
    assert f"{path}:{line}: " in str(caught.value)


def test_trace_that_is_no_text_or_no_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEADER.encode() + b"\n0,alloc,\xff,8,0\n")
    with pytest.raises(TraceError, match="UTF-8"):
        pack(path)
    with pytest.raises(TraceError, match="No such file"):
        pack(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="directory"):
        pack(tmp_path)


def test_a_replay_counts_what_it_was_given(trace: Trace) -> None:
    path = trace(
        lines([("alloc", 1, 3 * MIB), ("alloc", 2, 100), ("free", 9, 5), ("free", 1, 3 * MIB), ("alloc", 3, MIB)])
    )
    result = replay(path, Config(device="cpu", budget=64 * MIB, page_size=65536))
    assert set(result) == KEYS
    assert result["peak_live"] == 3 * MIB + 100
    assert result["ops"] == 4
    assert result["peak_physical"] >= result["peak_live"]
    assert result["peak_physical"] % 65536 == 0
    assert min(result["driver_calls"], result["ns_per_op"]) > 0
    assert replay(trace(HEADER), Config(device="cpu", budget=64 * MIB))["ops"] == 0


def waste(result: dict[str, int | float], page: int) -> float:
    """Pages of physical memory beyond 1.02 times the peak of what was live."""
    return (result["peak_physical"] - 1.02 * result["peak_live"]) / page


@pytest.mark.parametrize("page_size", PAGE_SIZES, ids=format_size)
@pytest.mark.parametrize("seed", [0])
def test_peak_memory_stays_close_to_what_is_live(trace: Trace, page_size: int, seed: int) -> None:
    """The pattern of inference: weights that stay, activations of varied lengths that come and go layer by layer."""
    draw = random.Random(seed)
    ops: list[tuple[str, int, int]] = []
    fresh = iter(range(10**6))

    def put(size: int) -> tuple[int, int]:
        block = next(fresh), size
        ops.append(("alloc", *block))
        return block

    for _ in range(24):
        for size in (8 * MIB, 2 * MIB, 2 * MIB, 8 * MIB, 22 * MIB, 4096):
            put(size)
    for _ in range(12):
        tokens = draw.randint(1, 512)
        hidden = put(tokens * 8192)
        for _layer in range(24):
            temporary = [put(tokens * draw.choice([2048, 8192, 8192, 22016])) for _ in range(5)]
            draw.shuffle(temporary)
            ops.extend(("free", *block) for block in temporary)
            ops.append(("free", *hidden))
            hidden = put(tokens * 8192)
        ops.append(("free", *hidden))
    config = Config(device="cpu", budget=4 * 2**30, page_size=page_size)
    assert waste(replay(trace(lines(ops)), config), page_size) <= 4


@pytest.mark.skipif(not RECORDED, reason="the recorded traces are not beside this checkout")
@pytest.mark.parametrize("page_size", PAGE_SIZES, ids=format_size)
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_traces(path: Path, page_size: int) -> None:
    result = replay(path, Config(device="cpu", budget=16 * 2**30, page_size=page_size))
    assert result["peak_live"] <= result["peak_physical"]
    if result["peak_live"] >= 64 * page_size:
        assert waste(result, page_size) <= 4
