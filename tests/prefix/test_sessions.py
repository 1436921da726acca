"""Conversations held by hand; what is pinned; what is left to transformers; what makes all void."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.utils import GenerationMixin

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import ManageError
from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.kv.pages import KVPages
from ballonet.hooks.weights.follow import MOVES

from ..models import build
from ..pool import tiny_layers
from ..tuned import Tuned
from .conversations import evict_all, growing, outside, sides, state, words
from .lives import add_adapters, switch

pytestmark = pytest.mark.chaos


PAGE = 4096
ONE_OF_EACH: Final = ("gemma2", "qwen3_next", "mamba2")  # whose layers keep windows or states
FEW: Final[dict[str, Any]] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**24, PAGE):
        yield


def test_a_row_with_more_pads_than_what_is_stored_of_the_others() -> None:
    generator = torch.Generator().manual_seed(9)
    with sides() as both:
        ids = torch.cat([both.ask(words(generator, 20)), words(generator, 40)], 1)
        padded = torch.cat([torch.zeros(1, 60, dtype=torch.int64), words(generator, ids.shape[1] - 60)], 1)
        both.ask(torch.cat([ids, padded]), attention_mask=torch.cat([torch.ones_like(ids), (padded != 0).long()]))
        assert both.reused == 25


@pytest.mark.parametrize("name", ["llama", *ONE_OF_EACH])
def test_a_session(name: str) -> None:
    with sides(name) as both, ballonet.Session(both.model) as session:
        for _ in range(3):
            before = len(session.tokens)
            session.generate([*range(5, 12)], **FEW)
            assert session.reused == max(0, before - 1)
        other = session.fork()
        assert other.tokens == session.tokens
        assert other.generate(torch.tensor([[5, 6]]), **FEW).shape == (1, 4)
        assert other.reused == len(session.tokens) - 1
        assert len(other.tokens) == len(session.tokens) + 6
        evict_all(both.store)
        both.check(tokens=False)
        assert both.store.states == (2 if name in ONE_OF_EACH else 0), "the ends of both conversations are pinned"
        session.generate([7], **FEW)
        assert session.reused >= len(session.tokens) - 6, "it is pinned"
        session.generate([7], use_cache=False, **FEW)
        assert session.reused == 0, "it never asked"
        del other
        session.close()
        session.close()
        gc.collect()
        both.ask(torch.tensor([[7]]))
        evict_all(both.store)
        assert both.store.pages == both.store.states == both.store.tokens == 0
        with pytest.raises(ManageError, match="closed"):
            session.generate([7])


def test_a_fork_keeps_what_was_said_when_the_session_is_closed() -> None:
    with sides() as both:
        with ballonet.Session(both.model) as session:
            session.generate(words(torch.Generator().manual_seed(1), 40), **FEW)
            other = session.fork()
        both.ask(torch.tensor([[7]]))
        evict_all(both.store)
        other.generate([5], **FEW)
        assert other.reused == len(session.tokens) - 1


def test_a_session_stays_whole_above_the_limit_of_the_store() -> None:
    with sides() as both:
        both.store.limit = PAGE
        with ballonet.Session(both.model) as session:
            for turn in range(3):
                before = len(session.tokens)
                session.generate(words(torch.Generator().manual_seed(turn), 40), **FEW)
                assert session.reused == max(0, before - 1)
            assert both.store.nbytes > PAGE
            assert both.store.counts.moves == 2, "pages that are pinned are gone on with"
        assert both.store.nbytes <= PAGE


@pytest.mark.counts
@pytest.mark.parametrize(("asked", "changes"), [(4, []), (1, ["retire", "map"])])
def test_pages_stay_that_the_rest_of_the_prompt_will_lie_on(
    monkeypatch: pytest.MonkeyPatch, asked: int, changes: list[str]
) -> None:
    """A prompt leaves a sequence behind its last full block, with 32 tokens on a page. The last page stays where the
    prompt is as long; else it goes back, and the answer gets another one."""
    generator = torch.Generator().manual_seed(1)
    changed: list[str] = []
    with sides() as both:
        ids = both.ask(words(generator, 190))  # whose last token is in no cache: 195 are on 7 pages, 191 on 6
        for name in ("map", "retire"):
            act = getattr(KVPages, name)

            def noted(pages: KVPages, first: int, end: int, *more: Any, act: Any = act, name: str = name) -> None:
                if pages._tier is not None:
                    changed.append(name)
                act(pages, first, end, *more)

            monkeypatch.setattr(KVPages, name, noted)
        both.ask(torch.cat([ids[:, :191], words(generator, asked)], 1), **FEW)
        assert both.store.counts.moves == 1
        assert list(dict.fromkeys(changed)) == changes
        both.check()


def test_refused_prompt_leaves_the_session_as_it_was() -> None:
    with sides() as both, ballonet.Session(both.model) as session:
        for wrong, error in (
            ([], ManageError),
            (torch.tensor([5.5, 6.0]), TypeError),
            ([5.5], TypeError),
            (torch.ones(2, 3, dtype=torch.int64), ValueError),
        ):
            with pytest.raises(error):
                session.generate(wrong)
        assert session.tokens == ()
        session.generate([5, 6], **FEW)
        said = session.tokens
        with pytest.raises(ValueError, match="nonsense"):
            session.generate([7], nonsense=True)
        assert session.tokens == said
        session.generate([], **FEW)
        assert session.tokens[: len(said)] == said
        assert session.reused == len(said) - 1
        with pytest.raises(ValueError, match="not pinned"):
            both.store.unpin([1, 2])


def test_pinned_sequence_is_copied_not_cut() -> None:
    """A request that leaves a pinned sequence near its end copies; it would go on with one that is not."""
    generator = torch.Generator().manual_seed(1)
    with sides() as both:
        for pinned in (True, False):
            ids = both.ask(words(generator, 100))
            if pinned:
                both.store.pin(ids[0, :-1])
            both.ask(torch.cat([ids[:, :-4], words(generator, 3)], 1))
            assert (both.store.counts.copies, both.store.counts.moves) == ((1, 0) if pinned else (1, 1))
            assert both.store.get_num_new_matched_tokens(ids) == ids.shape[1] - (1 if pinned else 4)


def test_a_session_needs_a_store() -> None:
    model = build("llama")
    with pytest.raises(ManageError, match="prefix_cache=True"):
        ballonet.Session(model)
    with ballonet.manage(model) as managed:
        assert managed.prefixes is None
        with pytest.raises(ManageError, match="prefix_cache=True"):
            ballonet.Session(model)


def test_generate_is_left_as_it_was() -> None:
    before, signature = GenerationMixin.generate, inspect.signature(GenerationMixin.generate)
    models = [build("llama"), build("gpt2")]
    managed = [ballonet.manage(model, prefix_cache=True) for model in models]
    assert GenerationMixin.generate is not before
    assert inspect.signature(GenerationMixin.generate) == signature
    assert GenerationMixin.generate.__doc__ == before.__doc__
    for handle in managed:
        assert GenerationMixin.generate is not before
        handle.release()
    assert GenerationMixin.generate is before
    models.append(build("llama"))
    ballonet.manage(models[-1], prefix_cache=True)
    models[-1].generate(words(torch.Generator(), 30), **FEW)
    del handle, managed, models
    gc.collect()
    assert GenerationMixin.generate is before
    devices.require().reap(wait=True)
    assert devices.require().snapshot()["pages"]["kv"] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cache": False}, "use_cache is off"),
        ({"past_key_values": "cache"}, "a cache was given"),
        ({"cache_implementation": "static"}, "the cache is not dynamic"),
        ({"inputs_embeds": "embeds"}, "no input_ids were given"),
        ({"prompt_lookup_num_tokens": 2}, "neither sampling, greedy nor beam search"),
        ({"attention_mask": "holes"}, "the attention mask is more than padding on the left"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states was given"),
        ({"position_ids": "positions"}, "position_ids was given"),
        ({"attention_mask": "twos"}, "the attention mask says more than which tokens count"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_call_without_a_plain_prompt_is_left_to_stock(options: dict[str, Any], reason: str) -> None:
    generator = torch.Generator().manual_seed(1)
    with sides() as both:
        known = both.ask(words(generator, 20))
        ids = torch.cat([known, words(generator, 3)], 1)
        length = ids.shape[1]
        made = {
            "cache": lambda: DynamicCache(config=both.stock.config),
            "embeds": lambda: both.stock.get_input_embeddings()(ids).detach(),
            "holes": lambda: torch.tensor([[1, 0] + [1] * (length - 2)]),
            "twos": lambda: torch.full((1, length), 2),  # that positions are counted by
            "positions": lambda: torch.arange(length)[None] + 1,
        }

        def given() -> dict[str, Any]:
            return {name: made[value]() if value in made else value for name, value in options.items()} | FEW

        prompt = () if "inputs_embeds" in options else (ids,)
        got, want = both.model.generate(*prompt, **given()), both.stock.generate(*prompt, **given())
        got, want = (output if isinstance(output, torch.Tensor) else output.sequences for output in (got, want))
        assert torch.equal(got, want)
        assert both.store.counts.why_not == {reason: 1}
        assert both.store.counts.requests == 1
        both.check()


def weight_of(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj.weight


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        weight_of(model).mul_(1.5)


def change_assign(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight_of(model) * 2)


def change_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


def change_fused(model: Any) -> None:
    """By a kernel that counts no version."""
    weight = weight_of(model)
    weight.grad = torch.ones_like(weight)
    version = weight._version
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    assert weight._version == version
    weight.grad = None


def change_round(model: Any) -> None:
    """The forwards have it moved to ranges, the last one to where it was before."""
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        with torch.no_grad():
            model(words(torch.Generator().manual_seed(2), 5))


def change_module(model: Any) -> None:
    """Changes a module that has no weights."""
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = 77.0
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


CHANGES: Final = (change_in_place, change_assign, change_hook, change_fused, change_round, change_module)


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_another_prefix(change: Any) -> None:
    with sides() as both:
        ids = both.ask(words(torch.Generator().manual_seed(1), 20))
        change(both.model)
        change(both.stock)
        both.known.clear()
        again = both.ask(ids)
        assert not both.reused
        again = both.ask(again)  # before the first forward memory of what is new was another
        both.ask(again)
        assert both.reused == again.shape[1] - 1


def test_adapters_that_are_switched() -> None:
    """What one has computed is not another's, and is found again when it is back."""
    with sides(prepare=add_adapters) as both:
        ids, answers = words(torch.Generator().manual_seed(1), 60), []
        for adapter in (0, 1, 2, 1, 0, 2):
            switch((both.model, both.stock), adapter)
            answers.append(both.ask(answers[adapter] if len(answers) > 2 else ids))
            assert both.reused == (65 if len(answers) > 3 else 0)
        assert not torch.equal(answers[0], answers[1]), "the adapters do something"


def test_memory_that_is_replaced_twice() -> None:
    """What is replaced often lies where torch puts it, which may be where it was before."""
    with sides() as both:
        ids = words(torch.Generator().manual_seed(1), 20)
        for _ in range(MOVES + 4):
            weight = weight_of(both.model)
            for _ in range(2):
                weight.data = weight.data * 1.1
            for fresh in (True, False):
                both.model.generate(ids, **FEW)
                assert not fresh or not both.store.reused
        both.model.generate(ids, **FEW)  # the one before kept tokens of the weights where they are now
        assert both.store.reused == ids.shape[1] - 1


def test_an_optimizer_of_another_model_changes_nothing() -> None:
    with sides() as both:
        ids = both.ask(words(torch.Generator().manual_seed(1), 20))
        change_fused(both.stock)
        both.model.generate(ids, **FEW)
        assert both.store.reused == ids.shape[1] - 1


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 39),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0], "factor": 4.0}, 40),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_positions_that_depend_on_the_length(kind: dict[str, Any], last: int) -> None:
    """Keys of a long sequence are not those of a short one that it begins with: what may get longer is left alone, and
    of the others the tokens are those of a model that begins anew."""
    plain = build("llama").config
    for name in ("short_factor", "long_factor"):
        kind = kind | ({name: kind[name] * (plain.head_dim // 2)} if name in kind else {})
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 40, **kind}
    changes = {"rope_parameters": rope, "max_position_embeddings": 40}
    with sides(changes=changes) as both:
        ids = words(torch.Generator().manual_seed(1), 80)
        for length, reused in ((70, 0), (20, 0), (last - 3, 20), (last - 2, 0), (50, 0), (last - 4, last - 5)):
            tokens = both.model.generate(ids[:, :length], **FEW)
            assert torch.equal(tokens, copy.deepcopy(both.stock).generate(ids[:, :length], **FEW))
            assert both.store.reused == reused, length
        assert both.store.counts.why_not == {"the positions depend on how long the sequence gets": 3}


@pytest.mark.parametrize("name", ["llama", *ONE_OF_EACH])
def test_held_cache_keeps_its_values(name: str) -> None:
    """A hook that keeps the cache: what is stored is a copy."""
    generator, held = torch.Generator().manual_seed(4), []

    def hold(module: Any, args: Any, kwargs: Any) -> None:
        held.append(given_cache(kwargs))

    with sides(name) as both:
        ids = words(generator, 9)
        with both.model.register_forward_pre_hook(hold, with_kwargs=True):
            for _ in range(3):
                ids = both.ask(torch.cat([ids, words(generator, 5)], 1))
            assert both.reused
        both.check()
        kept = growing(held[-1].layers), state(held[-1].layers)
        kept = [tuple(map(outside, pair)) for pair in kept[0]], kept[1]
        for _ in range(2):
            both.ask(torch.cat([ids, words(generator, 3)], 1))
        evict_all(both.store)
        for before, now in zip(kept[0], growing(held[-1].layers), strict=True):
            assert all(map(torch.equal, before, now))
        assert state(held[-1].layers) == kept[1]
        held.clear()
