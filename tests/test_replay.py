"""Recorded allocations: what is read, what is refused and where, and how much memory a trace needs."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from ballonet.allocator import defaults, device_choice
from ballonet.allocator.allocation_trace import peaks, read
from ballonet.allocator.config import Config, format_size
from ballonet.allocator.errors import TraceError
from ballonet.allocator.replay import AllocatorRun, Replay, replay

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


def lines(ops: Sequence[tuple[str, int, int]]) -> str:
    return "\n".join([HEADER, *(f"{i},{op},{block},{size},0" for i, (op, block, size) in enumerate(ops))])


def test_allocations_and_their_frees_are_read_in_order(trace: Trace) -> None:
    """An id may come back after its free; other operations, and frees of older blocks, are skipped."""
    path = trace(
        f"{HEADER}\n0,segment_alloc,x,,\n0,free,8,64,0\n0,free,-1,64,0\n0,alloc,7,100,0\n1,alloc,8,4096,3\n"
        "2,free,7,100,0\n3,free,8,4096,3\n3,snapshot,,,\n4,alloc,7,16,0\n"
    )
    assert read(path).ops == [(1, 7, 100, 0), (1, 8, 4096, 3), (0, 7, 0, 0), (0, 8, 0, 3), (1, 7, 16, 0)]


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
    assert read(trace(text)).ops == [(1, 1, 8, 0)]


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
        read(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert reason in str(caught.value)
    assert f"{path}:{line}: " in str(caught.value)


def test_trace_that_is_no_text_or_no_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEADER.encode() + b"\n0,alloc,\xff,8,0\n")
    with pytest.raises(TraceError, match="UTF-8"):
        read(path)
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="directory"):
        read(tmp_path)


def ours(done: Replay) -> AllocatorRun:
    return next(run for run in done.runs if run.name == "ballonet")


def test_a_replay_counts_what_it_was_given(trace: Trace) -> None:
    path = trace(
        lines([("alloc", 1, 3 * MIB), ("alloc", 2, 100), ("free", 9, 5), ("free", 1, 3 * MIB), ("alloc", 3, MIB)])
    )
    done = replay(path, Config(device="cpu", budget=64 * MIB, page_size=65536))
    facts, run = done.facts(), ours(done)
    assert (done.peak_live, facts["ops"]) == (3 * MIB + 100, 4)
    assert done.needed == run.peak >= done.peak_live
    assert done.needed % 65536 == 0
    assert done.fits
    assert min(run.driver_calls or 0, run.ns_per_op or 0) > 0
    assert list(done.live) == [3 * MIB, 3 * MIB + 100, 3 * MIB + 100, MIB + 100]
    assert len(run.series) == 4
    assert all(had >= live for had, live in zip(run.series, done.live, strict=True))
    assert replay(trace(HEADER), Config(device="cpu", budget=64 * MIB)).facts()["ops"] == 0


def test_a_budget_that_is_too_small_names_one_that_is_not(trace: Trace) -> None:
    path = trace(lines([("alloc", 1, 30 * MIB), ("alloc", 2, 30 * MIB), ("free", 1, 0), ("alloc", 3, 10 * MIB)]))
    small = replay(path, Config(device="cpu", budget=40 * MIB, page_size=MIB))
    assert (small.fits, small.budget, small.facts()["fits"]) == (False, 40 * MIB, False)
    assert replay(path, Config(device="cpu", budget=small.needed, page_size=MIB)).fits


def test_a_trace_larger_than_the_machine_needs_no_memory(trace: Trace) -> None:
    """A block of 40 GiB, and of a PiB of addresses in pages as on a GPU."""
    size = 40 * 2**30
    done = replay(trace(lines([("alloc", 1, size), ("free", 1, 0), ("alloc", 2, size - MIB)])), Config(device="cpu"))
    assert (done.peak_live, done.page_size) == (size, defaults.PAGE_SIZE["cuda"])
    assert size <= done.needed <= 1.01 * size


def test_the_stand_in_of_this_process_is_as_it_was_after_a_replay(trace: Trace) -> None:
    before = device_choice.choose(Config(device="cpu")).facts
    device = device_choice.open_device(Config(device="cpu", budget=16 * MIB, page_size=MIB))
    replay(trace(lines([("alloc", 1, MIB)])), Config(device="cpu", budget=8 * MIB, page_size=MIB))
    assert device_choice.choose(Config(device="cpu")).facts == {**before, "context_active": True}
    block = device.allocate(15 * MIB)
    device.deallocate(block)
    device.close()


def test_unbacked_pages_have_memory_once_they_are_written_to() -> None:
    """Touching one by mistake is no signal; pages of a device that is opened later have memory at once."""

    def committed() -> int:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        files = [os.stat(link) for link in links if os.path.exists(link) and "ballonet-device" in os.readlink(link)]
        return sum(file.st_blocks * 512 for file in files)

    before = committed()
    device = device_choice.open_unbacked(Config(device="cpu"), 2 * MIB, 2**30)
    block = device.allocate(512 * MIB)
    assert committed() == before
    ctypes.memset(block + 511 * MIB, 7, 1000)
    assert ctypes.string_at(block + 511 * MIB, 3) == b"\7\7\7"
    assert before < committed() <= before + 2 * MIB
    device.deallocate(block)
    device.close()
    backed = device_choice.open_device(Config(device="cpu", budget=16 * MIB, page_size=MIB))
    block = backed.allocate(4 * MIB)
    assert committed() >= before + 4 * MIB
    backed.deallocate(block)
    backed.close()


# -- snapshots


def event(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 5, "frames": []}


def segment(address: int, size: int, *live: tuple[int, int], **more: Any) -> dict[str, Any]:
    """A segment with blocks (requested bytes, bytes) at its beginning."""
    blocks = [{"size": size, "requested_size": asked, "state": "active_allocated"} for asked, size in live]
    blocks.append({"size": size - sum(length for _, length in live), "requested_size": 0, "state": "inactive"})
    told = {"device": 1, "address": address, "total_size": size, "stream": 0, "segment_type": "large"}
    return {**told, "blocks": blocks, **more}


EVENTS = [
    event("free_requested", 0x5000, 400),
    event("free_completed", 0x5000, 400),
    event("segment_alloc", 0x200000, 20 * MIB),
    event("alloc", 0x200000, 15 * MIB + 3, 7),
    event("alloc", 0x5000, 300),
    event("oom", 0, 2**40),
    event("free_requested", 0x200000, 15 * MIB + 3, 7),
    event("free_completed", 0x200000, 15 * MIB + 3, 7),
    event("segment_free", 0x200000, 20 * MIB),
    event("segment_alloc", 0x900000, 2 * MIB),
]
SEGMENTS = [segment(0x1000, 2 * MIB, (1000, 0x4000), (300, 512)), segment(0x900000, 2 * MIB)]


def snapshot(
    events: Sequence[dict[str, Any]] = EVENTS, segments: Sequence[dict[str, Any]] = SEGMENTS
) -> dict[str, Any]:
    """What torch writes of device 1, whose recording began when blocks of 1000 and 400 bytes were there."""
    return {"segments": [*segments], "device_traces": [[], [*events]], "external_annotations": []}


@pytest.mark.parametrize("kind", ["pickle", "page"])
def test_a_snapshot_is_read_with_what_is_older_and_what_torch_had(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(snapshot()))
    else:
        path.write_text(_memory_viz.trace_plot(snapshot()))
    done = replay(path, Config(device="cpu"))
    assert [op[2:] for op in done.trace.ops] == [(1000, 0), (400, 0), (0, 0), (15 * MIB + 3, 7), (300, 0), (0, 7)]
    assert (done.trace.older, done.facts()["device"], done.peak_live) == (2, 1, 1000 + 15 * MIB + 3 + 300)
    native, expandable, _ = done.runs
    assert (native.source, native.peak, native.driver_calls) == ("as recorded", 22 * MIB, 3)
    assert list(native.series) == [2 * MIB, 2 * MIB, 2 * MIB, 22 * MIB, 22 * MIB, 22 * MIB]
    assert (expandable.peak, expandable.series) == (None, ())
    assert expandable.source == "none: no GPU is here, and the recording is of native"


def column(done: Replay, name: str) -> tuple[int | None, str]:
    return next((run.peak, run.source) for run in done.runs if run.name == name)


@pytest.mark.parametrize(
    ("taken", "native", "expandable"),
    [
        (
            snapshot(segments=[{**SEGMENTS[0], "is_expandable": True}, SEGMENTS[1]]),
            (None, "is of exp"),
            (22 * MIB, "as rec"),
        ),
        (snapshot() | {"ballonet": {}}, (None, "is of ballonet"), (None, "is of ballonet")),
        (
            snapshot() | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "ballonet"}},
            (None, "is of ballonet"),
            (None, "is of ballonet"),
        ),
        (snapshot(segments=[]), (None, "fewer than its blocks"), (None, "fewer than its blocks")),
        (
            snapshot([event("alloc", 0x9000, 5)], [{**segment(0x1000, MIB), "segment_type": 0}]),
            (MIB, "as recorded"),
            (None, "is of native"),
        ),
    ],
    ids=["expandable", "ballonet", "torch's under ballonet", "a part of the segments", "no event of a segment"],
)
def test_a_column_has_the_figures_of_its_allocator_or_why_there_are_none(
    taken: dict[str, Any], native: tuple[int | None, str], expandable: tuple[int | None, str], tmp_path: Path
) -> None:
    (tmp_path / "memory").write_bytes(pickle.dumps(taken))
    done = replay(tmp_path / "memory", Config(device="cpu"))
    for name, (peak, says) in (("native", native), ("expandable segments", expandable)):
        had, source = column(done, name)
        assert had == peak
        assert says in source


def test_a_profile_s_page_says_nothing_of_segments(tmp_path: Path) -> None:
    """`torch.cuda._memory_viz.profile_plot` makes one segment of all addresses."""
    made = segment(0x1000, 2**40)
    del made["segment_type"]
    events = [event for event in EVENTS if not event["action"].startswith("segment")]
    (tmp_path / "page").write_text(_memory_viz.trace_plot(snapshot(events, [made])))
    done = replay(tmp_path / "page", Config(device="cpu"))
    assert column(done, "native") == (
        None,
        "none: no GPU is here, and the recording says nothing of segments",
    )


def test_segments_in_a_csv_file_count_where_they_cover_its_blocks(trace: Trace) -> None:
    text = f"{HEADER}\n0,segment_alloc,,4194304,0\n1,alloc,7,4000000,0\n"
    assert column(replay(trace(text), Config(device="cpu")), "native") == (4 * MIB, "as recorded")
    done = replay(trace(text + "2,alloc,8,4000000,0\n"), Config(device="cpu"))
    assert column(done, "native")[1].endswith("the segments of the recording are fewer than its blocks")


class Caller:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_a_pickle_that_calls_something_is_refused_before_it_does(tmp_path: Path) -> None:
    path, folder = tmp_path / "memory.pickle", tmp_path / "made"
    for plain in (b"", b"\x95"):  # with and without a frame
        path.write_bytes(pickle.dumps(snapshot() | {"more": Caller(folder)}, 4 if plain else 3))
        with pytest.raises(TraceError, match=r"asks for posix.mkdir, .*has no classes and calls nothing"):
            read(path)
    path.write_text(_memory_viz.trace_plot(snapshot() | {"more": Caller(folder)}))
    with pytest.raises(TraceError, match=r"asks for posix.mkdir"):
        read(path)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(snapshot())[:-40], "is a damaged pickle"),
        (b"\x80\x04\x8e" + b"\xff" * 8, "is a damaged pickle"),
        (b"\x80\x04Pabc\nQ.", "is a damaged pickle"),
        (pickle.dumps([1, 2]), "is no memory snapshot of PyTorch"),
        (pickle.dumps(snapshot([])), r"has no events: call torch.cuda.memory._record_memory_history\(\)"),
        (pickle.dumps(snapshot([{"action": "alloc"}])), "event 0 of device 1"),
        (pickle.dumps(snapshot([event("alloc", 5, -1)])), "event 0 of device 1 .*-1 is no number of bytes"),
        (pickle.dumps(snapshot(segments=[{"address": 0}])), "a segment is not as it writes them"),
        (b"<!DOCTYPE html><p>hello", "is a page without a snapshot in it"),
        (b'<script>[{"name": "x", "base64": "abc"}]', "whose snapshot is damaged"),
    ],
)
def test_a_file_that_is_no_snapshot_is_told(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read(tmp_path / "memory")


WORDS = st.sampled_from(["device_traces", "segments", "action", "addr", "size", "blocks", "alloc"])
PLAIN = st.recursive(
    st.one_of(st.none(), st.integers(), WORDS),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(WORDS, inner)),
)


@given(PLAIN)
def test_any_plain_pickle_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "memory"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(TraceError):
        read(path)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99))), st.integers(1, 40))
def test_peaks_are_the_highest_levels_of_each_part(steps: list[tuple[int, int]], parts: int) -> None:
    levels, at = [(0, 50)], 0
    for step, level in steps:
        at += step
        levels.append((at, level))
    operations = at + 1
    in_force = [[level for start, level in levels if start <= place][-1:] for place in range(operations)]
    every = [max(now + [level for start, level in levels if start == place]) for place, now in enumerate(in_force)]
    tops = peaks(levels, operations, parts)
    assert len(tops) == min(parts, operations)
    assert max(tops) == max(every)
    for part, top in enumerate(tops):
        place = operations * part // len(tops), operations * (part + 1) // len(tops)
        assert top >= max(every[slice(*place)])


def waste(result: Replay) -> float:
    """Pages of physical memory beyond 1.02 times the peak of what was live."""
    return (result.needed - 1.02 * result.peak_live) / result.page_size


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
    assert waste(replay(trace(lines(ops)), config)) <= 4


@pytest.mark.skipif(not RECORDED, reason="the recorded traces are not beside this checkout")
@pytest.mark.parametrize("page_size", PAGE_SIZES, ids=format_size)
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_traces(path: Path, page_size: int) -> None:
    result = replay(path, Config(device="cpu", budget=16 * 2**30, page_size=page_size))
    assert result.peak_live <= result.needed
    if result.peak_live >= 64 * page_size:
        assert waste(result) <= 4
