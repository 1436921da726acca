"""A cache that is saved, and every call that a cache answers: as stock does it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import ballonet
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer

from .caches import filled, same, tensors
from .models import build
from .pool import in_pool
from .programs import run

pytestmark = pytest.mark.usefixtures("large_pages")
LOAD_WITHOUT_BALLONET = """
import sys
sys.modules["ballonet"] = None
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
with torch.serialization.safe_globals([DynamicCache, DynamicLayer]):
    saved, expected = torch.load(sys.argv[1], weights_only=True)
assert type(saved) is DynamicCache and {type(layer) for layer in saved.layers} == {DynamicLayer}
for (keys, values, _), (theirs, others) in zip(saved, expected, strict=True):
    assert torch.equal(keys, theirs) and torch.equal(values, others)
keys, values = expected[0]
assert saved.update(keys, values, 0)[0].shape[2] == 2 * keys.shape[2]
saved.crop(-3)
"""


def test_a_saved_cache_can_be_loaded_where_there_is_no_ballonet(tmp_path: Path) -> None:
    model = build("llama")
    with ballonet.manage(model):
        cache = filled(model)
    contents = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    nbytes = sum(tensor.nbytes for pair in contents for tensor in pair)
    torch.save(cache, tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_size < 2 * nbytes + 20_000
    for loaded in (torch.load(tmp_path / "cache", weights_only=False), pickle.loads(pickle.dumps(cache))):
        same(tensors(loaded), tensors(cache))
    torch.save((cache, contents), tmp_path / "both")
    run(LOAD_WITHOUT_BALLONET, tmp_path / "both")


def test_exposed_storage_is_mapped_and_no_more(large_pages: int, tmp_path: Path) -> None:
    model = build("llama")
    cache = filled(model, past_key_values=KVCache(model.config, max_length=100_000))
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values, layer.keys[:, :, -1:]):
            assert in_pool(tensor)
            storage = tensor.untyped_storage()
            pages = 1 - (-2 * layer.get_seq_length() * 3 * 128 // large_pages)
            assert storage.nbytes() <= pages * large_pages
            assert len(bytes(storage)) == storage.nbytes()  # read byte by byte
            torch.save(tensor, tmp_path / "tensor")
            assert (tmp_path / "tensor").stat().st_size < storage.nbytes() + 5000
            assert torch.equal(torch.load(tmp_path / "tensor"), tensor)


def outcome(act: Callable[[Any], Any], cache: Any) -> Any:
    """What it returns, or the type of the error."""
    try:
        return act(cache)
    except Exception as error:  # whatever stock raises is what ours has to raise
        return type(error)


def update(states: list[torch.Tensor], cache: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in cache.update(*states, 0)]


def states_of(layer: Any) -> list[Any]:
    """Beside keys and values: of the convolution, and the recurrent one."""
    return [held[0] for name in ("conv_states", "recurrent_states") if (held := getattr(layer, name, None)) is not None]


def contents(cache: Any) -> list[Any]:
    """Copies of all that its layers hold."""
    parts_of_layers = [(layer.keys, layer.values, *states_of(layer)) for layer in cache.layers]
    return [None if part is None else part.clone() for parts in parts_of_layers for part in parts]


def fill(cache: Any, layers: int, tokens: int, batch: int = 3) -> None:
    """Gives tokens to so many layers, and states to those that have any."""
    for index in range(layers):
        cache.update(torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 8), index)
        if states_of(cache.layers[index]):
            cache.layers[index].update_conv_state(torch.randn(batch, 5, max(3, tokens)), conv_kernel_size=3)
            cache.layers[index].update_recurrent_state(torch.randn(batch, 5, 7))


def changed(cache: Any, copied: Callable[[Any], Any]) -> list[Any]:
    """What a copy has once it was changed."""
    twin = copied(cache)
    kinds, before = ([type(part) for part in (it, *it.layers)] for it in (twin, cache))
    assert kinds == before
    fill(twin, 1, 2)
    twin.reorder_cache(torch.tensor([1, 0, 0]))
    return contents(twin)


def crop_what_is_recorded(cache: Any) -> None:
    cache.activate_past_recording()
    fill(cache, len(cache.layers), 4)
    cache.crop(-2)
    cache.crop(-1)


EMPTY = torch.zeros(0, dtype=torch.int64)
CALLS: dict[str, Callable[[Any], Any]] = {
    "length": lambda cache: (cache.get_seq_length(), cache.get_seq_length(2), cache.get_seq_length(7)),
    "longest": lambda cache: (cache.get_max_length(), cache.get_max_length(1), cache.get_max_length(7)),
    "masks": lambda cache: [cache.get_mask_sizes(n, layer) for n in (1, 5) for layer in (0, 2, 7)],
    "flags": lambda cache: [
        getattr(cache, name)
        for name in ("is_compileable", "is_croppable", "is_initialized", "is_sliding", "is_linear", "batch_size")
    ],
    "layers": lambda cache: [(layer.keys.dtype, layer.device, layer.is_sliding) for layer in cache.layers],
    "recording": lambda cache: (cache.activate_past_recording(), [hasattr(x, "record_past") for x in cache.layers]),
    "parts": lambda cache: [[part.clone() for part in parts if part is not None] for parts in cache],
    "count": len,
    "copied by parts": lambda cache: tensors(DynamicCache(list(cache))),
    "offload": lambda cache: [(cache.offload(i), cache.layers[i].prefetch()) for i in range(3)],
    "early": lambda cache: cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu")),
    "copy": lambda cache: changed(cache, copy.deepcopy),
    "pickle": lambda cache: changed(cache, lambda cache: pickle.loads(pickle.dumps(cache))),
    "reset": lambda cache: [layer.reset() for layer in cache.layers],
    "crop": lambda cache: cache.crop(-3),
    "crop what is recorded": crop_what_is_recorded,
    "crop by nothing": lambda cache: cache.crop(0),
    "crop by everything": lambda cache: cache.crop(-cache.get_seq_length()),
    "crop to": lambda cache: cache.crop(4),
    "crop to more": lambda cache: cache.crop(400),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
    "reorder to one": lambda cache: cache.reorder_cache(torch.tensor([1])),
    "reorder wrongly": lambda cache: cache.reorder_cache(torch.tensor([9, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "repeat never": lambda cache: cache.batch_repeat_interleave(0),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "select none": lambda cache: cache.batch_select_indices(EMPTY),
    "select by slice": lambda cache: cache.batch_select_indices(slice(1, None)),
    "select one": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select wrongly": lambda cache: cache.batch_select_indices(torch.tensor([5])),
    "linear state": lambda cache: cache.has_previous_state(0),
    "indexer": lambda cache: cache.update_indexer(torch.ones(1, 1, 4), 0),
    "other methods": lambda cache: sorted(name for name in dir(cache) if not name.startswith("_")),
}


@functools.cache
def config_of(name: str) -> Any:
    return build(name).config if name else None


@pytest.mark.parametrize("empty", [False, True], ids=["filled", "empty"])
@pytest.mark.parametrize("name", ["llama", "", "gemma2", "falcon_h1"])  # "": unknown; some layers have windows; states
@pytest.mark.parametrize("call", CALLS)
def test_every_call_answers_as_stock_does(call: str, name: str, empty: bool) -> None:
    """The cache takes more tokens afterwards, as stock does, or fails as it does."""
    config = config_of(name)
    ours, stock = KVCache(config), DynamicCache(config=config)
    layers = len(stock.layers) or 3
    results: list[Any] = []
    for cache in (ours, stock):
        torch.manual_seed(1)
        fill(cache, 0 if empty else layers, 20)
        elastic = [layer.elastic for layer in cache.layers if isinstance(layer, ElasticLayer)]
        assert empty or cache is stock or (elastic and all(elastic))
        answers = [outcome(CALLS[call], cache), cache.get_seq_length(), outcome(contents, cache)]
        batch = 3 if empty or not cache.get_seq_length() else cache.layers[0].keys.shape[0]
        more = [torch.randn(batch, 2, 4, 8) for _ in range(2)]
        answers.append(outcome(functools.partial(update, more), cache))
        results.append(answers)
    same(*results)
