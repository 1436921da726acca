"""Everything that transformers and its users do with a cache, on a managed model: the tokens of stock."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, TextIteratorStreamer

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.kv.cache import KVCache
from ballonet.testing import chaos_of

from .caches import BUDGET, filled, is_elastic, same, tensors
from .models import build, generate, prompts
from .pool import in_pool

pytestmark = pytest.mark.usefixtures("large_pages")
INPUTS = prompts(batch=3, longest=12)
ONE = {name: tensor[:1] for name, tensor in INPUTS.items()}
Run = Callable[[Any], Any]


def as_stock(run: Run, *, elastic: bool = True) -> None:
    """`run(model)` gives the same with the model managed, plain and under chaos, as it does with stock."""
    with install.stock():
        model = build("llama")
        expected = run(model)
    with ballonet.manage(model):
        same(run(model), expected)
    with testing.manage(model, chaos=11) as handle:
        same(run(model), expected)
        moved = chaos_of(handle).moved
        assert moved["weights"] > 0
        assert (moved["kv_device"] + moved["kv_host"] > 0) == elastic


def managed(model: Any) -> bool:
    return any(module._forward_pre_hooks for module in model.modules())


def with_prompt_lookup(model: Any) -> torch.Tensor:
    return generate(model, "greedy", ONE, tokens=30, prompt_lookup_num_tokens=4).tokens


def with_an_assistant(model: Any) -> torch.Tensor:
    with install.stock():
        helper = build("llama", num_hidden_layers=1)
    with testing.manage(helper, chaos=11) if managed(model) else nullcontext():
        return generate(model, "greedy", ONE, tokens=30, assistant_model=helper).tokens


def drop_last(cache: Any) -> None:
    cache.crop(-5)


def drop_all(cache: Any) -> None:
    cache.crop(-cache.get_seq_length())


def drop_more_than_all(cache: Any) -> None:
    cache.crop(-1000)


def start_again(cache: Any) -> None:
    for layer in cache.layers:
        layer.reset()


def swap(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([2, 0, 1]))


def thrice(cache: Any) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))


def by_mask(cache: Any) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, False, False, True]))


BETWEEN = (drop_last, thrice, swap, drop_all, by_mask, drop_last, start_again, swap, drop_more_than_all)


def test_a_conversation_goes_on_from_its_cache() -> None:
    """After each turn the cache is changed, and whoever looked at it before still sees what was there."""

    def run(model: Any) -> list[torch.Tensor]:
        cache, ids, outputs = None, INPUTS["input_ids"], []
        for turn, between in enumerate(BETWEEN):
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=9, do_sample=False, return_dict_in_generate=True
            )
            cache = out.past_key_values
            assert is_elastic(cache) == managed(model)
            views = [(layer.keys, layer.values) for layer in cache.layers] if turn else []
            before = [(keys.clone(), values.clone()) for keys, values in views]
            between(cache)
            length = cache.get_seq_length()
            ids = torch.cat([out.sequences[:, :length], out.sequences[:, 3:7]], dim=1)
            outputs += [out.sequences, *[layer.keys.clone() for layer in cache.layers if length]]
            with torch.no_grad():
                model(ids[:, length : length + 1], past_key_values=cache)
            cache.crop(-1)
            same(views, before)
        return outputs

    as_stock(run)


def from_embeddings(model: Any) -> torch.Tensor:
    embeddings = model.get_input_embeddings()(INPUTS["input_ids"]).detach()
    tokens: torch.Tensor = model.generate(
        inputs_embeds=embeddings, attention_mask=INPUTS["attention_mask"], max_new_tokens=14, do_sample=False
    )
    return tokens


def in_chunks(size: int, model: Any) -> list[torch.Tensor]:
    outputs = [generate(model, "greedy", INPUTS, prefill_chunk_size=size).tokens]
    cache = KVCache(model.config) if managed(model) else DynamicCache(config=model.config)
    for start in range(0, 12, size):
        part = slice(start, start + size)
        with torch.no_grad():
            out = model(
                INPUTS["input_ids"][:, part],
                attention_mask=INPUTS["attention_mask"][:, : start + size],
                past_key_values=cache,
            )
        outputs.append(out.logits)
    return [*outputs, generate(model, "greedy", INPUTS, past_key_values=copy.deepcopy(cache)).tokens]


class Letters:
    """The part of a tokenizer that a streamer asks for."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(token)} " for token in ids)


def streamed_from_a_thread(model: Any) -> torch.Tensor:
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=600)  # type: ignore[arg-type]
    arguments = {**ONE, "streamer": streamer, "max_new_tokens": 20, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return torch.tensor([int(word) for word in text.split()])


def greedy_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A decoding of one's own, for `custom_generate=`."""
    cache = given_cache(kwargs)
    step = input_ids
    for _ in range(15):
        step = model(step, past_key_values=cache).logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, step], dim=1)
    return input_ids


def by_a_decoding_of_ones_own(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(INPUTS["input_ids"], custom_generate=greedy_loop, max_new_tokens=15)
    return tokens


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def within(around: Callable[[], Any], model: Any) -> torch.Tensor:
    with around():
        return generate(model, "beam", INPUTS).tokens


RUNS: dict[str, Run] = {
    "prompt lookup": with_prompt_lookup,
    "assistant": with_an_assistant,
    "embeddings": from_embeddings,
    **{f"chunks of {size}": functools.partial(in_chunks, size) for size in (1, 5)},
    "streamer": streamed_from_a_thread,
    "own decoding": by_a_decoding_of_ones_own,
    "inference mode": functools.partial(within, torch.inference_mode),
    "deterministic": functools.partial(within, deterministic),
    "dispatch mode": functools.partial(within, functools.partial(FlopCounterMode, display=False)),
    "anomaly": functools.partial(within, torch.autograd.detect_anomaly),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("how", RUNS)
def test_however_it_is_run_it_answers_as_stock_does(how: str) -> None:
    as_stock(RUNS[how])


def test_autocast() -> None:
    """Keys come in float32 from the rotation and values in bfloat16: two widths, which is the stock layer's work."""

    def run(model: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            cache = filled(model)
        assert not managed(model) or not is_elastic(cache)
        return tensors(cache)

    as_stock(run, elastic=False)


def test_a_cache_outlives_its_model_and_serves_an_equal_one() -> None:
    model = build("llama")
    more = torch.arange(2, 9).expand(1, 7)
    device = devices.require()
    ballonet.manage(model)
    cache = filled(model)
    before = tensors(cache)
    model = None
    gc.collect()
    device.reap(wait=True)
    assert device.snapshot()["pages"]["weights"] == 0
    assert is_elastic(cache)
    assert all(in_pool(layer.keys) for layer in cache.layers)
    same(tensors(cache), before)

    def go_on(model: Any) -> torch.Tensor:
        mine = copy.deepcopy(cache) if managed(model) else DynamicCache(list(cache), config=model.config)
        ids = torch.cat([torch.zeros(1, mine.get_seq_length(), dtype=torch.int64), more], dim=1)
        tokens: torch.Tensor = model.generate(ids, past_key_values=mine, max_new_tokens=9, do_sample=False)
        return tokens

    as_stock(go_on)
    same(tensors(cache), before)


def test_a_cache_is_usable_after_the_release_and_after_restore(large_pages: int) -> None:
    def use() -> None:
        model = build("llama")
        with ballonet.manage(model):
            cache = filled(model)
        before = tensors(cache)
        stock = DynamicCache(list(cache), config=model.config)
        with torch.no_grad():
            expected = model(torch.tensor([[5]]), past_key_values=stock).logits
        ballonet.restore()  # puts torch's allocator back; the device stays for what lies in it
        for _ in range(2):
            assert is_elastic(cache)
            same(tensors(cache), before)
            with torch.no_grad():
                same(model(torch.tensor([[5]]), past_key_values=cache).logits, expected)
            cache.crop(-1)

    use()
    gc.collect()
    ballonet.restore()
    assert devices.current() is None
    ballonet.install(BUDGET, page_size=large_pages, device="cpu")
