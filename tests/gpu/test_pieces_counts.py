"""What a token costs by pieces: calls of Python and of C, and of the driver; and what the graphs read and write."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballonet
from ballonet.hooks.kv.layer import ElasticLayer

from .. import models
from ..contract.simulated import Counts
from .decoding import answer, apart, between, decoding, prompt, seeing_caches
from .scene import Place, scene
from .stock import small_layers

LAYERS = 32
FEW, MANY = 16, 48  # tokens of two calls: the difference is what tokens cost


def calls_of(act: Callable[[], object]) -> int:
    """Calls of Python's and C's functions on this thread."""
    count = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    try:
        sys.setprofile(profile)
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def per_token(model: Any, given: dict[str, Any]) -> float:
    def call(tokens: int) -> None:
        model.generate(**given, max_new_tokens=tokens, do_sample=False)

    call(FEW)
    few, many = (calls_of(lambda tokens=tokens: call(tokens)) for tokens in (FEW, MANY))
    return (many - few) / (MANY - FEW)


@scene(only="cuda", pages=128)
@pytest.mark.parametrize(("padded", "share"), [(False, 0.20), (True, 0.30)])
def test_token_by_pieces_takes_a_share_of_stocks_calls(place: Place, padded: bool, share: float) -> None:
    model = models.build("llama", num_hidden_layers=LAYERS).to(place.kind)
    given = prompt("llama", place, padded=padded)
    stock = per_token(model, given)
    with decoding(model) as managed:
        calls = per_token(model, given)
        assert managed.report().pieces.captures == 1
    print(f"{calls:.0f} of {stock:.0f} calls, {calls / stock:.3f}")
    assert calls <= share * stock


def library() -> Any:
    """The simulated device."""
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "simgpu_graphs_using"):
        pytest.skip("a real device does not tell")
    driver.simgpu_graphs_using.restype = ctypes.c_size_t
    return driver


def counted() -> Counts:
    counts = Counts()
    library().simgpu_counts(ctypes.byref(counts))
    return counts


@scene(only="cuda", pages=128)
@pytest.mark.parametrize(("padded", "waits"), [(False, 1), (True, 2)])
def test_host_waits_for_a_token_as_rarely_as_its_padding_allows(place: Place, padded: bool, waits: int) -> None:
    """Stock's loop asks whether all sequences have ended; and where `generate()` has kept the mask, as it hides
    something, each forward asks again whether it does."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place, padded=padded)

    def waits_of_tokens() -> set[int]:
        before: list[int] = []
        answer(model, given, 20, **between(lambda _: before.append(counted().synchronizations)))
        return {now - was for was, now in itertools.pairwise(before[4:])}

    assert waits_of_tokens() == {waits}
    with decoding(model):
        for _ in range(2):
            answer(model, given)
        assert waits_of_tokens() == {waits}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_replayed_token_changes_no_page(place: Place, name: str) -> None:
    """While its cache needs none: a page has many tokens."""
    model = models.build(name).to(place.kind)
    given = prompt(name, place)
    before: list[tuple[int, int, int]] = []

    def note(_: int) -> None:
        counts = counted()
        before.append((counts.maps, counts.unmaps, managed.report().pieces.replayed))

    with decoding(model) as managed:
        for _ in range(2):
            answer(model, given)
        place.synchronize()
        answer(model, given, 20, **between(note))
        replayed = [(now[0] - was[0], now[1] - was[1]) for was, now in itertools.pairwise(before) if now[2] > was[2]]
        assert len(replayed) >= 15
        assert set(replayed) == {(0, 0)}


@scene(only="cuda", needs_host=True, pages=128, host_pages=64)
@pytest.mark.parametrize(
    ("name", "interval"),
    [
        *itertools.product(["llama", "gemma3_text", "mixtral", "deepseek_v2", "falcon_h1"], [None, 2]),
        ("gemma3n_text", None),  # its layers are given each other's KV, and cannot run on their own
    ],
)
def test_no_graph_holds_an_address_of_a_cache(place: Place, name: str, interval: int | None) -> None:
    """Neither of KV in the pool nor of what a cache keeps beside it; though graphs read the model's weights."""
    device = library()
    model = models.build(name).to(place.kind)
    given = prompt(name, place)

    def uses(address: int, nbytes: int) -> int:
        count: int = device.simgpu_graphs_using(ctypes.c_uint64(address), ctypes.c_uint64(nbytes), None)
        return count

    seen = [0, 0]

    def look(_: int, cache: Any) -> None:
        for layer in models.layers_of(cache):
            for state in tensors_of(layer):
                storage = state.untyped_storage()
                assert not uses(storage.data_ptr(), storage.nbytes()), "a graph reads or writes a cache"
                seen[0] += 1
            if isinstance(layer, ElasticLayer) and layer._range is not None:
                lies = layer._range.range
                assert not uses(lies.address, lies.nbytes), "a graph holds an address of KV"
                seen[1] += 1

    with small_layers(), decoding(model, interval=interval) as managed:
        with seeing_caches(model, look):
            for _ in range(3):
                answer(model, given)
        assert seen[0], "no cache was looked at"
        assert name == "falcon_h1" or seen[1], "no KV lies in the pool"
        weights = [parameter for parameter in model.parameters() if parameter.is_cuda]
        assert any(uses(weight.data_ptr(), weight.nbytes) for weight in weights), "graphs are not seen"
        assert managed.report().pieces.graphs
        del weights


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Tensors that a layer of a cache keeps."""
    values = [getattr(layer, name, None) for name in ("keys", "values")]
    for value in vars(layer).values():
        values += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]


def live_blocks(pool: Any) -> set[int]:
    segments = torch._C._cuda_memorySnapshot(None)["segments"]
    ours = [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool._pool)]
    return {block["address"] for segment in ours for block in segment["blocks"] if block["state"] != "inactive"}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_live_blocks_of_the_pool_are_the_tensors_of_its_programs(place: Place, name: str) -> None:
    model = models.build(name).to(place.kind)
    asked = [prompt(name, place, rows=rows) for rows in (2, 3)]
    with decoding(model) as managed:
        for given in asked:
            answer(model, given)
            runner = managed._pieces
            live = live_blocks(runner._pool)
            tensors = {tensor.untyped_storage().data_ptr() for tensor in runner._tensors()}
            assert live
            assert live <= tensors, "something else is kept in the graphs' memory"
            assert managed.report().pieces.pages >= 1


@scene(only="cuda", pages=128)
def test_pool_with_a_tensor_of_others_is_told(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    with decoding(model) as managed:
        answer(model, prompt("llama", place))
        pool, runner = managed._pieces._pool, managed._pieces
        tensors = list(runner._tensors())
        assert pool.holds_only(tensors)
        crossing = {tensor.untyped_storage().data_ptr() for tensor in tensors} & live_blocks(pool)
        missing = next(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() in crossing)
        address = missing.untyped_storage().data_ptr()
        assert not pool.holds_only([tensor for tensor in tensors if tensor.untyped_storage().data_ptr() != address])
        del tensors, missing


@scene(only="cuda", pages=128)
def test_table_that_a_module_keeps_is_refused(place: Place) -> None:
    """A module that computes a table in the first step that needs it, and reads it in later ones."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    mlp = model.model.layers[1].mlp

    class Keeping(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            key = x.shape[1]
            if key not in self.tables:
                self.tables[key] = torch.ones_like(x)
            return self.inner(x) * self.tables[key]

    model.model.layers[1].mlp = Keeping(mlp)
    with ballonet.manage(model) as managed:
        for _ in range(3):
            assert not apart(answer(model, given), expected)
        assert managed.report().pieces.why
        assert managed.report().pieces.replayed == 0
    model.model.layers[1].mlp = mlp


@scene(only="cuda", pages=256)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workspaces_of_cublas_outlive_the_graphs_of_another_program(place: Place, dtype: str) -> None:
    """One program's graphs are gone, and all memory that is free has been written to by others: the other one, which
    goes on with what it has captured, computes the same bits."""
    if hasattr(ctypes.CDLL("libcuda.so.1"), "simgpu_graphs_using"):
        pytest.skip("a simulated device has no cuBLAS, and so no workspaces")
    model = models.build("llama", hidden_size=256, intermediate_size=512).to(place.kind, getattr(torch, dtype))
    first, second = (prompt("llama", place, rows=rows) for rows in (2, 3))
    expected = answer(model, second)
    others: list[torch.Tensor] = []

    def give_away(_: int) -> None:
        runner = managed._pieces
        gone, kept = runner._plans.values()
        for variant in gone.variants:
            variant.program.close()
        runner._plans.popitem(last=False)
        assert kept.replays(kept.call)
        gc.collect()
        torch.cuda.empty_cache()
        for nbytes in (2**15, 2**20, 2**22, 2**25):
            others.extend(torch.full((nbytes,), 255, dtype=torch.uint8, device=place.kind) for _ in range(4))

    with decoding(model) as managed:
        answer(model, first)
        answer(model, second)
        captured = managed.report().pieces.captures
        assert not apart(answer(model, second, **between(give_away, at=5)), expected)
        others.clear()
        assert not apart(answer(model, second), expected)
        assert managed.report().pieces.captures == captured
