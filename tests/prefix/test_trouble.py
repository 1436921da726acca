"""Several threads on one model, and Ctrl-C and errors in the middle of a turn."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from ballonet.allocator import devices
from ballonet.hooks.kv import layer as kv_layer
from ballonet.hooks.kv import ranges as kv_range
from ballonet.hooks.prefix import contents, index, sequence, sessions, store

from ..faulting import at_each_line
from ..pool import tiny_layers
from ..tuned import Tuned
from .conversations import Sides, evict_all, sides, words
from .test_sessions import ONE_OF_EACH

pytestmark = pytest.mark.chaos


PAGE = 4096
STORE = (contents, index, sequence, sessions, store)
PARTS = (kv_layer, kv_range, *STORE)


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**23, PAGE):
        yield


def talk(both: Sides, seed: int, talks: list[torch.Tensor], turns: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(turns):
        ids = draw.choice(talks)
        end = draw.choice((ids.shape[1], draw.randint(ids.shape[1] // 2, ids.shape[1])))
        ids = both.ask(torch.cat([ids[:, :end], words(generator, 5)], 1))
        if ids.shape[1] < 150:
            talks.append(ids)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_threads_on_one_model(name: str) -> None:
    """Where layers keep a state each request counts its own forwards."""
    with sides(name, chaos=7) as both:
        talks = [words(torch.Generator().manual_seed(3), 60)]
        with ThreadPoolExecutor(3) as threads:
            for done in [threads.submit(talk, both, seed, talks, 8) for seed in range(3)]:
                done.result()
        both.check()
        counts = both.store.counts
        assert counts.hits > 200
        assert name == "mamba2" or counts.moves + counts.copies > 12


def elsewhere(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_sequence_being_copied_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request copies from a sequence another one, which would go on with it, copies as well; pages stay."""
    generator = torch.Generator().manual_seed(3)
    with sides() as both:
        ids = both.ask(words(generator, 100))
        more = torch.cat([ids[:, :-9], words(generator, 40)], 1)
        copy_in, part, moved = sequence.copy_in, sequence.CachedSequence.part, []

        first = iter((True, False))

        def slowly(*args: Any) -> None:
            if next(first):
                elsewhere(lambda: both.model.generate(more, max_new_tokens=2, min_new_tokens=2).shape)
            copy_in(*args)

        def held(self: sequence.CachedSequence, layer: int, start: int, end: int) -> Any:
            elsewhere(lambda: moved.append(self.kv_ranges[0].range.move(0, "host")))
            return part(self, layer, start, end)

        with monkeypatch.context() as patched:
            patched.setattr(store, "copy_in", slowly)
            both.ask(torch.cat([ids[:, :60], words(generator, 5)], 1))
        assert (both.store.counts.copies, both.store.counts.moves) == (2, 0)
        with monkeypatch.context() as patched:
            patched.setattr(sequence.CachedSequence, "part", held)
            both.ask(torch.cat([ids[:, :50], words(generator, 5)], 1))
        assert moved
        assert not any(moved)
        both.check()


@pytest.mark.counts
@pytest.mark.parametrize("away", [False, True])
def test_sequence_in_use_is_not_moved(away: bool) -> None:
    """Another one, which would go on with it as well, copies; or computes all where a page of it is `away`."""
    generator, others, answered = torch.Generator().manual_seed(3), list[torch.Tensor](), list[torch.Size]()

    def meanwhile(*_: Any) -> None:
        if others:
            ids = others.pop()
            if away:
                (in_use,) = both.store.contents.index._in_use
                assert in_use.kv_ranges[0].range.move(0, "host")
            elsewhere(lambda: answered.append(both.model.generate(ids, max_new_tokens=2).shape))

    with sides() as both:
        with both.model.register_forward_pre_hook(meanwhile):
            ids = both.ask(words(generator, 100))
            others.append(torch.cat([ids, words(generator, 40)], 1))
            both.ask(torch.cat([ids, words(generator, 5)], 1))
        assert answered
        assert (both.store.counts.copies, both.store.counts.moves) == (0 if away else 1, 1)
        both.check()


def test_reader_of_a_sequence_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with sides() as both:
        ids = both.ask(words(torch.Generator().manual_seed(3), 60))[0].tolist()

        with both.store.read(ids, both.store.identity(), 0, 40) as parts:
            assert parts is not None
            evict_all(both.store)
            assert both.store.get_num_new_matched_tokens(ids) == 65, "what is read stays"

        def gone(self: sequence.CachedSequence, *_: Any) -> Any:
            raise sequence.Gone(self)

        monkeypatch.setattr(sequence.CachedSequence, "part", gone)
        with both.store.read(ids, both.store.identity(), 0, 40) as parts:
            assert parts is not None
            with pytest.raises(sequence.Gone) as raised:
                parts(parts.layers[0])
        read = both.store.read(ids, both.store.identity(), 0, 40)
        assert read.__enter__() is not None
        assert not read.__exit__(raised.type, raised.value, None)


@pytest.mark.parametrize(("name", "step"), [("llama", 0), ("llama", 2), *((name, 2) for name in ONE_OF_EACH)])
def test_a_request_that_is_broken_off(name: str, step: int) -> None:
    """What it went on from is there yet. `step`: after which forward."""
    generator = torch.Generator().manual_seed(3)
    with sides(name) as both:
        ids = both.ask(words(generator, 60))
        calls = iter(range(step))

        def fail(*_: Any) -> bool:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            both.model.generate(
                torch.cat([ids, words(generator, 9)], 1), max_new_tokens=5, do_sample=False, stopping_criteria=[fail]
            )
        assert both.store.counts.copies == (name == "mamba2"), "of the others a sequence has been moved"
        both.check()
        both.ask(torch.cat([ids, words(generator, 3)], 1))
        assert both.reused == ids.shape[1] - 1


def test_a_request_that_is_only_collected_loses_what_it_went_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ctrl-C comes again before it gives that back."""
    generator = torch.Generator().manual_seed(3)
    with sides() as both:
        ids = both.ask(words(generator, 60))
        more = torch.cat([ids, words(generator, 9)], 1)
        with monkeypatch.context() as patched:
            patched.setattr(sessions._Request, "broken_off", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                both.model.generate(more, max_new_tokens=5, stopping_criteria=[_interrupted])
        gc.collect()
        both.ask(torch.cat([ids, words(generator, 3)], 1))
        assert both.reused == 0
        both.check()


def _interrupted(*_: object, **__: object) -> bool:
    raise KeyboardInterrupt


def test_ctrl_c_anywhere() -> None:
    """Before any line of a turn that moves, copies, fills and stores: the next turns are right, and nothing is lost."""
    generator, draw = torch.Generator().manual_seed(3), random.Random(4)
    talks = [words(generator, 70)]
    with sides() as both:

        def turn(_: object = None) -> None:
            ids = draw.choice(talks)
            ids = torch.cat([ids[:, : draw.randint(ids.shape[1] // 2, ids.shape[1])], words(generator, 5)], 1)
            talks.append(both.ask(ids, max_new_tokens=2, min_new_tokens=2))

        for modules in (PARTS, (index,)):
            for _ in at_each_line(nullcontext, turn, *modules, most=10, least=60):
                turn()
                gc.collect()
                both.store.get_num_new_matched_tokens([1])
                both.check()
    gc.collect()
    device = devices.require()
    device.reap(wait=True)
    assert device.snapshot()["pages"]["kv"] == 0


def test_ctrl_c_while_blocks_are_evicted() -> None:
    """Before lines of the index, from the first to the last. What is pinned stays so."""
    generator = torch.Generator().manual_seed(3)
    pinned = words(generator, 20)
    with sides() as both:
        both.store.pin(pinned[0])

        def ask(ids: torch.Tensor | None = None) -> AbstractContextManager[object]:
            ids = words(generator, 20) if ids is None else ids
            return nullcontext(both.ask(ids, max_new_tokens=1, min_new_tokens=1))

        for _ in at_each_line(ask, lambda _: both.store.contents.give_up(1), index, most=24, least=100):
            ask(pinned)
            ask()
            both.check()
            evict_all(both.store)
            assert both.store.tokens == pinned.shape[1]
            both.store.clear()
