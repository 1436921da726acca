"""`ballonet.snapshot()`: pages in the format of PyTorch's memory viewer, named by what lies in them."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import pickle
import pickletools
import re
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NotRequired

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch.cuda import _memory_viz as viewer
from typing_extensions import TypedDict

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import ConfigError, NotInstalled
from ballonet.allocator.memory_snapshot import SnapshotContents, pages_by_owner, viewed

from .models import build, prompts
from .pool import take_out
from .tuned import Tuned

PAGE = 4096
# What the page at pytorch.org/memory_viz can read of pickle.
READ = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "NONE"),
    *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


@functools.cache
def declared() -> TypeAdapter[Any]:
    """The format as torch declares it, in the documentation of `_snapshot`: typed dictionaries, here as a schema."""
    text = inspect.cleandoc(str(torch.cuda.memory._snapshot.__doc__))
    match = re.search(r"code-block:: python\n\n(.*?)\nArgs:", text, re.DOTALL)
    assert match is not None
    code = re.sub(r"(fx_\w+): str", r"\1: NotRequired[str]", textwrap.dedent(match[1]))  # "optional", it says
    code = code.replace("active_awaiting_free", "active_pending_free")  # as torch itself writes it
    module = ModuleType("declared")
    names = {"List": list, "Tuple": tuple, "Literal": Literal, "NotRequired": NotRequired, "TypedDict": TypedDict}
    vars(module).update(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "declared", module)
        exec(f"from __future__ import annotations\n{code}", vars(module))
        return TypeAdapter(module.Snapshot)


def check_format(found: dict[str, Any]) -> None:
    """Checks that it is as declared, but for what torch recorded, and that its sums agree."""
    assert isinstance(found["device_traces"], list)
    declared().validate_python({**found, "device_traces": []}, strict=True)
    for segment in found["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert 0 <= block["requested_size"] <= block["size"] > 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        used = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(used) == viewer.calc_active(segment)


def flames(found: dict[str, Any]) -> str:
    """What torch makes a flame graph of: a line per block, the outermost frame first."""
    text: str = viewer.memory(found, format_flamegraph=str)
    return text


def names(found: dict[str, Any], owner: str) -> set[str]:
    """What is said to lie in the pages of the owner."""
    return {
        block["frames"][0]["name"]
        for segment in found["segments"]
        if segment["ballonet_owner"] == owner
        for block in segment["blocks"]
        if len(block["frames"]) > 1
    }


@pytest.fixture
def pool() -> Iterator[None]:
    ballonet.install(budget=1024 * PAGE, page_size=PAGE, host_budget=1024 * PAGE, device="cpu")
    yield
    devices.require().check()
    take_out()


def settled() -> tuple[dict[str, Any], dict[str, int]]:
    """A snapshot, and the pages by owner as the core counts them, while nothing changes."""
    devices.require().stop_background()
    devices.require().reap(wait=True)
    snapshot = ballonet.snapshot()
    return snapshot, {owner: pages for owner, pages in devices.require().snapshot()["pages"].items() if pages}


@pytest.mark.usefixtures("pool")
def test_all_pages_are_in_it_and_named_in_the_schema_that_torch_declares() -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=3)
        model.register_buffer("expanded", torch.ones(1, 9).expand(7, 9))
        for number, part in enumerate(torch.ones(40).split(20)):  # of one memory
            model.register_buffer(f"part_{number}", part)
    managed = ballonet.manage(model, interval=None)
    kept = torch.ones(3 * PAGE // 4)
    answer = model.generate(**prompts(batch=2, longest=9), max_new_tokens=4, return_dict_in_generate=True)
    snapshot, pages = settled()
    check_format(snapshot)
    assert snapshot["ballonet"]["pages"] == pages
    assert set(pages) >= {"weights", "kv", "activations"}
    assert names(snapshot, "weights") == {name for name, _ in model.named_parameters()} | {
        name for name, buffer in model.named_buffers() if buffer.numel()
    }
    held = {  # bytes of each tensor that lies in the pool
        block["frames"][0]["name"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if segment["ballonet_owner"] == "weights"
    }
    assert all(held[name] == weight.nbytes for name, weight in model.named_parameters())
    assert (held["expanded"], held["part_0"], held["part_1"]) == (36, 80, 80)
    assert names(snapshot, "kv") == {f"keys and values of layer {number}" for number in range(3)}
    assert f"ballonet:0:weights;{type(model).__name__}:0:model.layers.2.mlp.up_proj.weight " in flames(snapshot)
    assert f";ballonet:0:kv;KV cache of {type(model).__name__}:0:keys and values of layer 1 " in flames(snapshot)
    assert any(
        block["address"] == kept.data_ptr() and block["requested_size"] == kept.nbytes
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if segment["ballonet_owner"] == "activations"
    )
    declared().validate_json(json.dumps(snapshot), strict=True)
    for change in ({"state": "active"}, {"size": "4096"}, {"frames": None}):
        wrong = copy.deepcopy(snapshot)
        wrong["segments"][0]["blocks"][0] |= change
        with pytest.raises(ValidationError, match=next(iter(change))):
            declared().validate_json(json.dumps(wrong), strict=True)
    del answer
    managed.release()


def test_layers_are_named_by_their_numbers_in_the_model() -> None:
    """All layers that share a range are named, and windows, which are not in the pool, count as well."""
    ballonet.install(budget=2**24, page_size=2**16, device="cpu")
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
    model = build("qwen2", num_hidden_layers=5, layer_types=kinds, use_sliding_window=True, sliding_window=4)
    with ballonet.manage(model):
        answer = model.generate(**prompts(batch=1, longest=9), max_new_tokens=2, return_dict_in_generate=True)
        own = ballonet.KVCache()
        for number in range(2):
            own.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), number)
        twin = copy.deepcopy(own)
        twin.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 2)
        snapshot, _ = settled()
    named = [
        tuple(frame["name"] for frame in block["frames"])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if segment["ballonet_owner"] == "kv" and len(block["frames"]) > 1
    ]
    assert sorted({name for name, _ in named}) == [
        "keys and values of layer 0",
        "keys and values of layer 1",
        "keys and values of layer 2",
        "keys and values of layers 1, 2, 4",
    ]
    assert len(named) == 6, "two layers of a cache without a model, and three of its copy"
    assert f":0:kv;KV cache of {type(model).__name__}:0:keys and values of layers 1, 2, 4 " in flames(snapshot)
    assert ":0:kv;KV cache:0:keys and values of layer 1 " in flames(snapshot)
    del answer, own, twin
    gc.collect()
    take_out()


@pytest.mark.usefixtures("pool")
def test_the_viewers_own_code_reads_it(tmp_path: Path) -> None:
    tensors = [torch.ones(n) for n in (10, 1000, 5000)]
    path = tmp_path / "memory.pickle"
    made = ballonet.snapshot(path)
    read = [(op.name, argument) for op, argument, _ in pickletools.genops(path.read_bytes())]
    assert {name for name, _ in read} <= READ
    assert read[0][0] == "PROTO"
    assert 2 <= read[0][1] <= 4
    saved = pickle.loads(path.read_bytes())
    assert saved == made
    assert [file.name for file in tmp_path.iterdir()] == ["memory.pickle"]
    check_format(saved)
    assert f"segments: {len(saved['segments'])}" in viewer.segsum(saved)
    assert "activations" in flames(saved)
    assert "activations" in viewer.segments(saved, format_flamegraph=str)
    assert viewer.trace(saved) == ""
    for page in (viewer.trace_plot(saved), viewer.trace_plot(saved, plot_segments=True), viewer.segment_plot(saved)):
        assert "snapshot.pickle" in page
    del tensors
    gc.collect()
    later = ballonet.snapshot()
    assert saved["segments"][0]["allocated_size"] > later["segments"][0]["allocated_size"] == 0
    assert viewer.compare(saved["segments"], later["segments"], format_flamegraph=str) == ""  # the same segments


@pytest.mark.usefixtures("pool")
def test_of_layers_that_stream_the_slots_are_there(tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    with install.stock():
        model = build("llama", num_hidden_layers=4)
    managed = ballonet.manage(model, interval=2)
    snapshot, pages = settled()
    assert snapshot["ballonet"]["pages"] == pages
    here = names(snapshot, "weights")
    assert "slot 0 of layers that stream" in here
    away = {f"model.layers.{layer}.mlp.up_proj.weight" for layer in managed.report().streamed}
    assert away
    assert away & here == set()
    managed.release()


def test_spilled_pages_are_told_and_no_page_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_warned", False)  # by another test of this process
    ballonet.install(budget=16 * PAGE, page_size=PAGE, host_budget=64 * PAGE, device="cpu", spill=True)
    with pytest.warns(RuntimeWarning, match="lies on host pages"):
        tensors = [torch.ones(4 * PAGE // 4) for _ in range(8)]
    snapshot, pages = settled()
    spilled = snapshot["ballonet"]["pages"].pop("spilled")
    assert spilled == devices.require().snapshot()["spilled"] > 0
    assert snapshot["ballonet"]["pages"] == pages
    check_format(snapshot)
    del tensors
    take_out()


@pytest.mark.usefixtures("pool")
def test_pages_add_up_while_others_change_them() -> None:
    """A snapshot is of one moment: what exists is the sum of it, whatever two threads do."""
    device = devices.require()
    device.set_budget(64 * PAGE)
    ended = threading.Event()

    def maps() -> None:
        group = device.group()
        while not ended.is_set():
            opened = device.reserve(8 * PAGE, "kv", group)
            opened.map(0, 8)
            opened.close()

    def allocates() -> None:
        while not ended.is_set():
            device.deallocate(device.allocate(5 * PAGE))

    threads = [threading.Thread(target=work) for work in (maps, allocates)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            owners = pages_by_owner(viewed(device.segments()), PAGE)
            assert sum(owners.values()) <= 64
            assert owners.get("kv", 0) <= 8
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_snapshot_needs_a_pool_and_a_file_that_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="install"):
        ballonet.snapshot()
    ballonet.install(budget=64 * PAGE, page_size=PAGE, device="cpu")
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "no" / "file.pickle", folder):
        with pytest.raises(ConfigError, match="cannot be written"):
            ballonet.snapshot(path)
    assert list(tmp_path.rglob("*")) == [folder]
    take_out()


HISTORY: dict[str, Any] = {
    "segments": [
        {"address": 64, "blocks": [{"address": 64, "frames": [{"filename": "a.py", "line": 3, "name": "f"}]}]},
        {"address": 4096, "blocks": [{"address": 4096, "frames": []}]},
    ],
    "device_traces": [[], [{"action": "alloc", "addr": 64, "size": 100, "stream": 0, "frames": []}]],
    "allocator_settings": {"expandable_segments": True},
    "external_annotations": [],
}


def test_history_that_torch_recorded_is_taken_over() -> None:
    rows: list[Any] = [
        (64, 192, (0, 0), True, [(64, 128, 100, "allocated"), (192, 64, 0, "free")], "activations", 7),
        (4096, 4096, (0, 0), False, [(4096, 4096, 4096, "allocated")], "weights", 0),
    ]
    snapshot = viewed(rows, [SnapshotContents(4096, 4000, "w", "Net")], ordinal=1, history=HISTORY)
    check_format(snapshot)
    assert (snapshot["device_traces"], snapshot["allocator_settings"]) == (
        HISTORY["device_traces"],
        HISTORY["allocator_settings"],
    )
    first, second = snapshot["segments"]
    assert (first["device"], first["stream"], first["segment_type"], second["segment_type"]) == (1, 7, "small", "large")
    assert [frame["name"] for frame in first["blocks"][0]["frames"]] == ["f", "activations"]
    assert [(frame["filename"], frame["name"]) for frame in second["blocks"][0]["frames"]] == [
        ("Net", "w"),
        ("ballonet", "weights"),
    ]
    assert (first["allocated_size"], first["requested_size"], second["requested_size"]) == (128, 100, 4000)
    assert "alloc" in viewer.trace(snapshot) or "= " in viewer.trace(snapshot)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=4),
)
def test_runs_are_cut_where_contents_begin(lying: list[tuple[int, int]], runs: list[tuple[int, int]]) -> None:
    """Whatever lies where: blocks tile their run, and each byte of it is named for what lies there, once."""
    there: dict[int, str] = {}  # by byte; of two that overlap the one that begins first, or is longer
    for at, nbytes in sorted(lying, key=lambda each: (each[0], -each[1])):
        if at not in there:
            there |= dict.fromkeys(range(at, at + nbytes), f"{at}+{nbytes}")
    rows: list[Any] = [(at, n, (0, 0), False, [(at, n, n, "allocated")], "kv", 0) for at, n in runs]
    snapshot = viewed(rows, [SnapshotContents(at, nbytes, f"{at}+{nbytes}", "") for at, nbytes in lying])
    check_format(snapshot)
    for (at, nbytes), segment in zip(runs, snapshot["segments"], strict=True):
        named = {
            byte: block["frames"][0]["name"]
            for block in segment["blocks"]
            if len(block["frames"]) > 1
            for byte in range(block["address"], block["address"] + block["requested_size"])
        }
        assert named == {byte: name for byte, name in there.items() if at <= byte < at + nbytes}
