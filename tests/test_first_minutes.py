"""What users lose without a word: parts that are used first, weights that RL replaces, caches of their own, the next
model's budget; and what a process says of it at the end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import BudgetError
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.programs.first_use import FirstUse

from . import models
from .core import PAGE_CALLS
from .pool import installing
from .portrait import all_in_pool
from .tuned import Clock, Tuned

PAGE = 4096
BUDGET = 2**24


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": 2**11})
    with installing(BUDGET, PAGE) as now:
        yield now()


@contextmanager
def first_uses() -> Iterator[FirstUse]:
    """Models are managed at their first use, until the end of the block."""
    watching = FirstUse(clock=Clock(step=1e6))
    try:
        yield watching
    finally:
        watching.close()
        for handle in watching.managed:
            handle.release()


@pytest.fixture
def watching() -> Iterator[FirstUse]:
    with first_uses() as watching:
        yield watching


def llama(scale: float = 1.0, **changes: Any) -> Any:
    with install.stock(), torch.no_grad():
        model = models.build("llama", **{"hidden_size": 64, "intermediate_size": 96, **changes})
        for weight in model.model.layers.parameters():
            weight.mul_(scale)
        return model


def t5() -> Any:
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    with install.stock():
        torch.manual_seed(0)
        return T5ForConditionalGeneration(
            T5Config(vocab_size=99, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, **sizes)
        ).eval()


def answer(model: Any, tokens: int = 6, **more: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 7), tokens=tokens, **more).tokens


# A part before the whole


def test_an_encoder_used_first_is_taken_over_by_the_model_around_it() -> None:
    def run(model: Any) -> Any:
        with torch.no_grad():
            encoded = model.get_encoder()(prompt)
            parts.append([type(handle.model).__name__ for watching in uses for handle in watching.managed])
            return model.generate(
                encoder_outputs=encoded, max_new_tokens=9, do_sample=False, return_dict_in_generate=True
            )

    parts: list[list[str]] = []
    prompt, uses = torch.randint(3, 90, (1, 12)), list[FirstUse]()
    expected = run(t5()).sequences
    with first_uses() as watching:
        uses.append(watching)
        made = run(model := t5())
        assert parts[-1] == ["T5Stack"]
        assert [handle.model for handle in watching.managed] == [model]
        assert all_in_pool(model)
        assert isinstance(made.past_key_values.self_attention_cache.layers[0], ElasticLayer)
        assert torch.equal(made.sequences, expected)
        assert ballonet.report().conclusion == "managed T5Stack, T5ForConditionalGeneration"
        del made


def image_first(model: Any) -> torch.Tensor:
    """An answer about images whose features the program looks at before."""
    asked = models.questions("llava", 1)
    model.get_image_features(asked["pixel_values"], return_dict=True)
    return model.generate(**asked, max_new_tokens=6, do_sample=False)


def trunk_first(model: Any) -> torch.Tensor:
    """An answer of a model that got adapters after its trunk was in use."""
    model.model(models.prompts(1, 7)["input_ids"], use_cache=False)
    with install.stock():
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    return adapted.generate(**models.prompts(2, 7), max_new_tokens=6, do_sample=False)


def pipeline_after_trunk(model: Any) -> torch.Tensor:
    """What `pipeline()` generates with a model whose trunk was in use."""
    model.model(models.prompts(1, 7)["input_ids"], use_cache=False)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(model.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    ask = pipeline("text-generation", model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))
    (said,) = ask("w5 w9 w33 w71", max_new_tokens=6, do_sample=False, return_full_text=False)
    return torch.tensor([int(word[1:]) for word in said["generated_text"].split()])


@pytest.mark.parametrize(
    ("name", "use", "part"),
    [
        ("llava", image_first, "CLIPVisionModel"),
        ("llama", trunk_first, "LlamaModel"),
        ("llama", pipeline_after_trunk, "LlamaModel"),
    ],
    ids=["images", "adapters", "a pipeline"],
)
def test_a_whole_is_managed_however_its_part_came_first(
    name: str, use: Callable[[Any], torch.Tensor], part: str
) -> None:
    with install.stock():
        stock, model = models.build(name), models.build(name)
        expected = use(stock)
    with first_uses() as watching:
        answered = use(model)
        assert part in ballonet.report().conclusion
        assert torch.equal(answered, expected)
        assert all_in_pool(model)
        assert len(watching.managed) == 1


def test_a_part_that_streams_is_taken_over_where_both_would_not_fit(device: Device) -> None:
    model, prompt = llama(num_hidden_layers=8), models.prompts(1, 7)["input_ids"]
    expected = answer(llama(num_hidden_layers=8))
    ballonet.set_budget(225 * PAGE)
    with first_uses() as watching, torch.no_grad():
        model.model(prompt, use_cache=False)
        assert [type(handle.model).__name__ for handle in watching.managed] == ["LlamaModel"]
        assert watching.managed[0].report().streamed
        assert torch.equal(answer(model), expected)
        assert [handle.model for handle in watching.managed] == [model]
    device.check()


def test_of_two_models_on_one_trunk_the_one_that_generates_is_managed() -> None:
    policy, inputs = llama(), models.prompts(2, 7)
    expected = answer(llama())
    with install.stock():
        reward = LlamaForSequenceClassification(policy.config).eval()
    reward.model = policy.model
    with first_uses() as watching, torch.no_grad():
        reward(**inputs)
        assert [handle.model for handle in watching.managed] == [reward]
        with pytest.warns(RuntimeWarning, match="LlamaForSequenceClassification is managed in part"):
            tokens = answer(policy)
        assert torch.equal(tokens, expected)
        assert [handle.model for handle in watching.managed] == [policy]
        reward(**inputs)
        assert [handle.model for handle in watching.managed] == [policy]


def test_what_of_a_model_is_not_managed_is_said_once_and_in_the_report(watching: FirstUse) -> None:
    policy = llama()
    with install.stock():
        reward = LlamaForSequenceClassification(policy.config).eval()
    reward.model = policy.model
    answer(policy)
    with pytest.warns(RuntimeWarning, match=r"managed in part.*NOT managed is score") as warned:
        reward(**models.prompts(2, 7))
    with warnings.catch_warnings(action="error"):
        reward(**models.prompts(2, 7))
    assert warned[0].filename == __file__, "the warning is at the program's line"
    assert "NOT managed is score" in str(ballonet.report())


def test_a_part_that_the_program_manages_itself_is_left_to_it(watching: FirstUse) -> None:
    model = llama()
    with ballonet.manage(model.model):
        with pytest.warns(RuntimeWarning, match="NOT managed is lm_head"):
            answer(model)
        assert watching.managed == []


def test_a_part_stays_managed_where_the_whole_does_not_fit(device: Device, watching: FirstUse) -> None:
    model = llama()
    with install.stock():
        model.lm_head = nn.Linear(64, 40_000, bias=False)
    with torch.no_grad():
        model.model(models.prompts(1, 7)["input_ids"], use_cache=False)
        before = watching.managed[0].report().pages
        ballonet.set_budget(device.snapshot()["created"] * PAGE + 700 * PAGE)
        with pytest.warns(RuntimeWarning, match="NOT managed: LlamaForCausalLM"):
            model(models.prompts(1, 7)["input_ids"], use_cache=False)
    assert [type(handle.model).__name__ for handle in watching.managed] == ["LlamaModel"]
    assert watching.managed[0].report().pages + 60 >= before, "but for layers that were asked for, and stream now"
    assert not watching.managed[0].report().released


# Weights that are replaced


@pytest.mark.parametrize("how", ["data", "assign"])
def test_weights_replaced_at_every_step_stay_in_the_pool_for_ever(device: Device, how: str) -> None:
    model, source = llama(), llama(1.3)
    stock = llama()
    with ballonet.manage(model) as managed:
        for step in range(20):
            new = {name: tensor * (1 + step / 100) for name, tensor in source.state_dict().items()}
            for target in (model, stock):
                if how == "assign":
                    target.load_state_dict({name: tensor.clone() for name, tensor in new.items()}, assign=True)
                else:
                    for name, weight in target.named_parameters():
                        weight.data = new[name].clone()
            assert torch.equal(answer(model, 2), answer(stock, 2))
            assert managed.report().unmanaged_tensors == {}
    device.check()


@pytest.mark.counts
@pytest.mark.parametrize("more", [None, 2], ids=["plenty", "hardly"])
def test_weights_replaced_while_there_is_room_call_the_driver_for_no_page(device: Device, more: int | None) -> None:
    """New ones lie in the pages of those before, which stay mapped, as do those that the new ones came in. So it is
    where the budget is so many pages `more` than they take together."""
    model, calls = llama(), list[int]()
    with ballonet.manage(model) as managed:
        for step in range(8):
            if more is not None and step == 2:
                ballonet.set_budget((device.snapshot()["created"] + more) * PAGE)
            before = device.snapshot()["driver_calls"]
            for weight in model.parameters():
                weight.data = weight.data * (1 + step / 100)
            answer(model, 2)
            after = device.snapshot()["driver_calls"]
            calls.append(sum(after[name] - before[name] for name in PAGE_CALLS))
        assert managed.report().unmanaged_tensors == {}
    assert calls[-4:] == [0] * 4, calls
    device.check()


def test_views_of_weights_keep_what_they_show_when_those_are_replaced(device: Device) -> None:
    model = llama()
    with ballonet.manage(model):
        answer(model, 2)
        weight = model.model.layers[0].mlp.up_proj.weight
        view, expected = weight.data[3:5], weight.data[3:5].clone()
        for _ in range(3):
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
            answer(model, 2)
        assert torch.equal(view, expected)
        del view


def test_weights_replaced_in_a_tight_budget_stream_as_before(device: Device) -> None:
    model, stock = llama(num_hidden_layers=8), llama(num_hidden_layers=8)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    ballonet.set_budget(weights * 3 // 2)  # all of them, but not what a forward needs beside them
    with ballonet.manage(model) as managed:
        assert managed.report().streamed
        for step in range(6):
            for target, memory in ((model, nullcontext), (stock, install.stock)):
                with memory():
                    for weight in target.parameters():
                        weight.data = weight.data * (1 + step / 100)
            assert torch.equal(answer(model, 2), answer(stock, 2))
            assert managed.report().unmanaged_tensors == {}


# Caches that the program makes


@pytest.mark.parametrize("made", ["with the configuration", "without"])
def test_a_cache_made_by_hand_is_elastic_and_stock_for_whoever_looks(made: str) -> None:
    model, prompt = llama(), models.prompts(1, 30)["input_ids"]
    stock_model = llama()

    def run(model: Any) -> tuple[Any, torch.Tensor]:
        with torch.no_grad():
            cache = DynamicCache(config=model.config) if made == "with the configuration" else DynamicCache()
            held = list(cache.layers)
            model(prompt, cache=cache)
            copied = copy.deepcopy(cache)
            cache.crop(-3)
            logits = model(prompt[:, :3], cache=cache).logits
            out = model.generate(torch.cat([prompt, prompt[:, :5]], 1), cache=copied, max_new_tokens=5, do_sample=False)
        assert all(layer is other for layer, other in zip(cache.layers, held, strict=False)), "layers stay who they are"
        return cache, torch.cat([logits.argmax(-1), out], 1)

    stock, expected = run(stock_model)
    with ballonet.manage(model):
        cache, tokens = run(model)
        assert torch.equal(tokens, expected)
        assert all(isinstance(layer, ElasticLayer) and layer.elastic for layer in cache.layers)
        assert type(cache) is DynamicCache
        assert len(cache.layers) == len(stock.layers)
        for ours, theirs in zip(cache.layers, stock.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert type(copy.copy(ours).__reduce__()[0]()) is type(theirs), "pickled as stock"
        assert ballonet.stats().pages.kv > 0
        del cache


def test_tokens_of_a_stock_cache_are_taken_along_by_a_managed_model() -> None:
    model, prompt = llama(), models.prompts(1, 30)["input_ids"]
    with torch.no_grad():
        cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
        model(prompt, cache=cache)
        model(prompt, cache=other)
        expected = model(prompt[:, :1], cache=other).logits.argmax(-1)
        with ballonet.manage(model):
            assert torch.equal(model(prompt[:, :1], cache=cache).logits.argmax(-1), expected)
            assert isinstance(cache.layers[0], ElasticLayer)
        assert cache.get_seq_length() == prompt.shape[1] + 1


def test_a_pair_of_caches_made_for_an_encoder_and_decoder_is_elastic() -> None:
    model, prompt = t5(), torch.randint(3, 90, (1, 12))
    start = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = model(prompt, decoder_input_ids=start).logits
        with ballonet.manage(model):
            pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
            logits = model(prompt, decoder_input_ids=start, cache=pair).logits
            assert torch.equal(logits, expected)
            assert isinstance(pair.self_attention_cache.layers[0], ElasticLayer)
            assert isinstance(pair.cross_attention_cache.layers[0], ElasticLayer)


# The next model's budget


@settings(max_examples=15)
@given(
    layers=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    wide=st.sampled_from([32, 64]),
    tight=st.integers(40, 160),
)
def test_the_least_budget_that_a_refusal_names_works_for_the_next_model_too(
    layers: list[int], wide: int, tight: int
) -> None:
    def tried(budget: int) -> int:
        """The budget that a refusal names, 0 where all are managed."""
        ballonet.set_budget(budget)
        built = [llama(num_hidden_layers=count, hidden_size=wide) for count in layers]
        handles = []
        try:
            for model in built:
                handles.append(ballonet.manage(model))
                answer(model, 2)
        except BudgetError as error:
            return error.smallest
        finally:
            while handles:
                handles.pop().release()
        return 0

    try:
        named = tried(tight * PAGE)
        for _ in range(len(layers)):  # each refusal is of another model
            if named:
                before, named = named, tried(named)
                assert named == 0 or named > before
        assert named == 0
    finally:
        ballonet.set_budget(BUDGET)


# What is said


def test_the_report_of_a_process_says_what_was_managed_what_not_and_why(watching: FirstUse) -> None:
    model, large = llama(), llama(vocab_size=9000)
    assert ballonet.report().conclusion == "no model was managed"
    answer(model, 1)
    ballonet.set_budget(ballonet.stats().pages.weights * PAGE * 3)
    with warnings.catch_warnings(action="ignore"):
        answer(large, 1)
    report = ballonet.report()
    assert report.managed == {"LlamaForCausalLM": 1}
    assert "budget" in report.left["LlamaForCausalLM"]
    assert report.as_dict()["models"][0]["model"] == "LlamaForCausalLM"
    assert "NOT managed LlamaForCausalLM: budget" in str(report)
    assert "not managed: budget" in report._repr_html_()
