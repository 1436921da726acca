"""CUDA graphs of layers resident, with the default interval: their replays compute what stock does, whatever comes and
goes meanwhile. See tests/graphs.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator._native import Lease
from ballonet.allocator.errors import ManageError, PoolExhausted
from ballonet.hooks.device import managers
from ballonet.hooks.device.graphs import why_short
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.offload.manager.client import OUTSIDE_LAYERS
from ballonet.offload.policy.plan import spread, streaming
from ballonet.offload.policy.reclaim_order import PageSource

from .. import graphs
from ..models import build
from ..threads import elsewhere
from ..tuned import Clock, Tuned
from .conftest import BUDGET, INPUTS, LAYERS, PAGE, full

IDS = INPUTS["input_ids"]
EVERY = tuple(range(3 * LAYERS))  # as many that some may be taken where one is not


@pytest.fixture(scope="module")
def original() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=len(EVERY))


@pytest.fixture(scope="module")
def expected(original: Any) -> torch.Tensor:
    with install.stock():
        return logits(original)


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> Any:
    """Whose pages are always scarce, and whose link hides every copy. Graphs are those of tests/graphs.py."""
    graphs.pretend(monkeypatch)
    tuned(clock=Clock())
    ours = managers.of(devices.require())
    monkeypatch.setattr(ours.pages, "scarce", True)
    ours.link.bandwidth = 1e12
    return ours


def logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(IDS, **({"use_cache": False} | options)).logits
    return scores


class Captured:
    """A graph of some work, and what it says."""

    def __init__(self, work: Callable[[], torch.Tensor], pool: object = None) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with graphs.capture(self.graph, pool), torch.no_grad():
            self.output = work()

    def replay(self) -> torch.Tensor:
        self.output.zero_()
        self.graph.replay()
        with install.stock():
            return self.output.clone()


def prepare(model: Any) -> None:
    """Every layer that may be taken is offered."""
    manager = managers.of(devices.require())
    logits(model)
    manager._known.list.void()
    manager.reclaim.publish()
    manager.reclaim.publish_now()


@pytest.fixture
def managed(model: Any) -> Iterator[ballonet.Managed]:
    with ballonet.manage(model) as it:
        prepare(model)
        yield it


@contextmanager
def no_page_free() -> Iterator[Callable[[], bool]]:
    """Hands over what tries to have one more."""
    device = devices.require()
    with full(but=0):
        filler = device.reserve(BUDGET, "kv", device.group())
        left = iter(range(filler.pieces))

        def more() -> bool:
            try:
                filler.map(next(left), 1)
            except PoolExhausted:
                return False
            return True

        try:
            yield more
        finally:
            filler.close()


def reclaimed() -> int:
    pages: int = devices.require().snapshot()["reclaimed"]
    return pages


def take() -> int:
    """Pages run out: whatever may be taken is. How many pages that was."""
    before = reclaimed()
    with no_page_free() as more:
        while more():
            pass
    return reclaimed() - before


def test_a_captured_model_gives_nothing(model: Any, managed: ballonet.Managed, expected: torch.Tensor) -> None:
    captured = Captured(lambda: logits(model))
    assert managed.report().kept == EVERY
    assert f"{len(EVERY)} of them in CUDA graphs" in repr(managed)
    assert "that CUDA graphs have captured (0, 1" in str(managed.report())
    for _ in range(2):
        assert not take()
        assert torch.equal(logits(model), expected)
        assert torch.equal(captured.replay(), expected)
    assert managed.report().streamed == ()
    assert not devices.require().published
    captured.graph.reset()
    prepare(model)
    assert managed.report().kept == ()
    assert take()
    assert torch.equal(logits(model), expected)
    assert managed.report().streamed


def test_a_cache_that_finds_no_room_is_told_what_graphs_keep(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers.of(devices.require()), "spill", False)
    with install.stock():
        keys, values = torch.zeros(2, 1, 2, 64, 16)

    def message() -> str:
        with full(but=0), install.stock(), pytest.raises(torch.OutOfMemoryError) as raised:
            ElasticLayer().update(keys, values)
        return str(raised.value)

    with ballonet.manage(model):
        captured = Captured(lambda: logits(model))
        assert "CUDA graphs keep layers" in message()
        assert " of LlamaForCausalLM)" in message()
        del captured
        logits(model)
        assert why_short() == ""


@pytest.mark.usefixtures("managed")
def test_published_layers_are_withdrawn_before_a_capture(model: Any) -> None:
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(len(devices.require().published))

    assert devices.require().published
    with model.model.layers[0].input_layernorm.register_forward_pre_hook(look):
        Captured(lambda: logits(model))
    assert seen == [0]


def test_a_graph_that_holds_a_capture_cannot_begin_another_one(
    model: Any, managed: ballonet.Managed, expected: torch.Tensor
) -> None:
    captured = Captured(lambda: logits(model))
    with pytest.raises(AssertionError, match="owns a captured graph already"):
        captured.graph.capture_begin()
    prepare(model)
    assert not take()
    assert torch.equal(captured.replay(), expected)
    captured.graph.reset()
    with graphs.capture(captured.graph):
        pass
    assert managed.report().kept == (), "it can be used again"


def hidden(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, model.config.hidden_size, generator=generator)


def of_stock(original: Any, layer: int, part: str = "mlp") -> torch.Tensor:
    """What a part of the layer makes of `hidden`."""
    with install.stock(), torch.no_grad():
        output: torch.Tensor = original.model.layers[layer].get_submodule(part)(hidden(original))
    return output


@pytest.mark.parametrize("part", ["mlp", "self_attn.o_proj"])
def test_a_part_of_a_layer_that_is_called_by_itself(
    model: Any, managed: ballonet.Managed, original: Any, part: str
) -> None:
    states = hidden(model)
    captured = Captured(lambda: model.model.layers[3].get_submodule(part)(states))
    assert managed.report().kept == (3,)
    prepare(model)
    assert take()
    logits(model)
    assert managed.report().streamed
    assert 3 not in managed.report().streamed
    assert torch.equal(captured.replay(), of_stock(original, 3, part))
    assert not any(module._forward_pre_hooks for module in model.model.layers[3].mlp.modules())


def test_capture_of_a_weight_within_a_forward_keeps_all_layers(
    model: Any, managed: ballonet.Managed, original: Any, expected: torch.Tensor
) -> None:
    states, made = hidden(model), []

    def capture(*_: object) -> None:
        made.append(Captured(lambda: functional.linear(states, model.model.layers[5].mlp.up_proj.weight)))

    with model.model.norm.register_forward_pre_hook(capture):
        logits(model)
    assert managed.report().kept == EVERY
    prepare(model)
    take()
    assert torch.equal(logits(model), expected)
    assert torch.equal(made[0].replay(), of_stock(original, 5, "mlp.up_proj"))


def test_a_replay_is_leased(model: Any, managed: ballonet.Managed, original: Any) -> None:
    """Another thread runs out of pages while it is launched: it gets none, and says what it misses."""
    states, right = hidden(model), of_stock(original, 0)
    device, lease = devices.require(), Lease()
    tried: list[tuple[bool, int, int]] = []  # was there a page, what is demanded, what was taken
    captured = Captured(lambda: model.model.layers[0].mlp(states))
    prepare(model)

    def ask(more: Callable[[], bool]) -> None:
        before = reclaimed()
        tried.append(elsewhere(lambda: (more(), device.page_request, reclaimed() - before)))

    with no_page_free() as more:
        captured.graph.during = partial(ask, more)
        assert torch.equal(captured.replay(), right)
    assert managed._weights.group.leases == 0
    captured.graph.during = None
    with no_page_free() as more:
        lease.enter(managed._weights.group)
        ask(more)
        lease.close()
        assert tried == [(False, 1, 0)] * 2
        before = reclaimed()
        assert torch.equal(captured.replay(), right)
        assert reclaimed() > before, "it gave what was demanded before it was launched"


def test_model_stays_put_between_the_forwards_of_a_capture(
    model: Any, managed: ballonet.Managed, expected: torch.Tensor
) -> None:
    graph = torch.cuda.CUDAGraph()
    with graphs.capture(graph), torch.no_grad():
        first = logits(model)
        assert managed._weights.group.leases == 1
        with pytest.raises(ManageError, match="is running"):
            managed.release()
        second = logits(model)
    assert managed._weights.group.leases == 0
    for output in (first, second):
        output.zero_()
    graph.replay()
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


@pytest.mark.parametrize("interval", ["auto", 2])
def test_streamed_layer_cannot_be_captured(model: Any, expected: torch.Tensor, interval: Any) -> None:
    with ballonet.manage(model, interval=interval) as managed:
        prepare(model)
        if interval == "auto":
            assert take()
        away = managed.report().streamed
        assert away
        entered: list[Any] = []
        norm = model.model.layers[0].input_layernorm
        with norm.register_forward_pre_hook(lambda *_: entered.append(0)):
            with pytest.raises(ManageError, match="cannot be captured"):
                Captured(lambda: logits(model))
            assert not entered
        works: list[Callable[[], torch.Tensor]] = [
            lambda: logits(model),
            lambda: model.model.layers[away[0]].mlp(hidden(model)),
        ]
        if interval != "auto":  # that layers were taken is noticed at the next forward
            works.append(lambda: model.model.layers[away[0]].mlp.up_proj.weight.sum())
        for work in works:
            for _ in range(2):
                with pytest.raises(ManageError, match="cannot be captured"):
                    Captured(work)
        gc.collect()
        assert torch.equal(logits(model), expected)
        assert managed.report().kept == ()


def test_captured_layer_stays_resident_under_any_plan(
    model: Any, managed: ballonet.Managed, original: Any, expected: torch.Tensor
) -> None:
    states, right = hidden(model), of_stock(original, 3)
    elastic = managed._residency
    before = elastic.plan.pages
    captured = Captured(lambda: model.model.layers[3].mlp(states))
    pages = elastic.plan.pages
    assert [layer for layer in EVERY if pages[layer] != before[layer]] == [3]
    for plan in [streaming(pages, spread(pages, count), slots) for count in (1, 4, 11) for slots in (1, 2)]:
        elastic.rearrange(plan)
        assert managed.report().streamed == plan.streamed
        assert 3 not in managed.report().streamed
        assert torch.equal(logits(model), expected)
        assert torch.equal(captured.replay(), right)
        resident = {layer for layer in managed._weights.ranges if layer is not None} - {*managed.report().streamed}
        here = sum(range_.backed for layer in resident for range_ in managed._weights.ranges[layer])
        assert managed.report().freed_pages == sum(before) - here - managed._weights.ring.pages
    elastic.rearrange(streaming(before, (3, 5), 1))
    assert managed.report().streamed == plan.streamed
    assert all(candidate.index != 3 for candidate in managers.of(devices.require()).reclaim.candidates())


def test_a_floor_counts_what_is_kept(model: Any) -> None:
    with ballonet.manage(model, floor=20 * PAGE) as managed:
        assert managed._residency.floor == 20
        captured = Captured(lambda: model.model.layers[3].mlp(hidden(model)))
        assert managed._residency.floor == 20 - managed._weights.ranges[3][0].backed
        del captured


def test_a_capture_that_fails_keeps_nothing(model: Any) -> None:
    def fail() -> torch.Tensor:
        logits(model)
        assert managed.report().kept
        raise ValueError("as it should")

    with ballonet.manage(model) as managed:
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ValueError, match="as it should"), graphs.capture(graph):
            fail()
        del graph
        gc.collect()
        logits(model)
        assert managed.report().kept == ()
        graph = torch.cuda.CUDAGraph()
        graph.captured = True  # so that torch raises

        def begin(*_: object) -> None:
            with pytest.raises(AssertionError):
                graph.capture_begin()

        with model.model.norm.register_forward_pre_hook(begin):
            logits(model)
        logits(model)
        assert managed.report().kept == ()
        assert not any(module._forward_pre_hooks for module in model.model.layers[0].mlp.modules())


def test_a_capture_that_torch_knows_nothing_of(model: Any, managed: ballonet.Managed, expected: torch.Tensor) -> None:
    with graphs.captured_by_others():
        logits(model)
    assert managed.report().kept == EVERY
    prepare(model)
    assert not take()
    assert torch.equal(logits(model), expected)
    managed.release()
    with ballonet.manage(model) as again:
        assert again.report().kept == ()


def test_a_capture_that_torch_knows_nothing_of_begins_within_a_forward(model: Any, managed: ballonet.Managed) -> None:
    """The layers that run from then on are kept."""

    def begin(*_: object) -> None:
        captures.enter_context(graphs.captured_by_others())

    with ExitStack() as captures, model.model.layers[5].register_forward_hook(begin):
        logits(model)
    assert managed.report().kept == EVERY[6:]


def test_a_graph_of_a_model_that_is_released(model: Any) -> None:
    with ballonet.manage(model):
        captured = Captured(lambda: logits(model))
    with pytest.raises(ManageError, match="released"):
        captured.replay()
    del captured
    gc.collect()
    assert not any(hasattr(method, "__wrapped__") for method in vars(graphs.FakeGraph).values()), "as torch made them"


def test_graphs_that_share_memory_and_graphs_in_graphs(model: Any) -> None:
    states = hidden(model)
    with ballonet.manage(model) as managed:

        def left() -> tuple[int, ...]:
            gc.collect()
            logits(model)
            return managed.report().kept

        first = Captured(lambda: model.model.layers[0].mlp(states))
        shares = Captured(lambda: states + 1, first.graph.pool())  # as a backward, which calls no module
        alone = Captured(lambda: states + 2)
        del first
        assert left() == (0,)
        del shares
        assert left() == ()
        first = Captured(lambda: model.model.layers[0].mlp(states))
        contains = torch.cuda.CUDAGraph()
        with graphs.capture(contains):
            first.graph.replay()
        del first
        assert left() == (0,)
        del contains
        assert left() == ()
        del alone


def test_layers_that_get_another_number_stay(model: Any, managed: ballonet.Managed) -> None:
    states = hidden(model)
    captured = Captured(lambda: model.model.layers[3].mlp(states))
    right = captured.replay()
    del model.model.layers[1]
    for _ in range(2):
        logits(model)
    assert managed.report().kept == (2,)
    prepare(model)
    take()
    logits(model)
    assert torch.equal(captured.replay(), right)


def test_caches_that_are_made_within_a_capture_are_stock(model: Any, expected: torch.Tensor) -> None:
    caches: list[Any] = []

    def work() -> torch.Tensor:
        output = model(IDS, use_cache=True)
        caches.append(output.past_key_values)
        return output.logits

    with ballonet.manage(model):
        captured = Captured(work)
        cache = caches.pop()
        assert all(isinstance(layer, ElasticLayer) and not layer.elastic for layer in cache.layers)
        logits(model, past_key_values=cache, use_cache=True)
        assert all(layer.elastic for layer in cache.layers), "outside of it they are elastic"
        del cache
        gc.collect()
        logits(model, use_cache=True)  # another cache, where the pages of that one were
        assert torch.equal(captured.replay(), expected)


def test_a_step_that_is_captured_reads_the_cache_that_was_there(model: Any, original: Any) -> None:
    with install.stock(), torch.no_grad():
        cache = original(IDS, use_cache=True).past_key_values
        right = original(IDS[:, :1], past_key_values=cache).logits
    with ballonet.manage(model), torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
        assert all(layer.elastic for layer in cache.layers)
        captured = Captured(partial(lambda past: model(IDS[:, :1], past_key_values=past).logits, cache))
        assert torch.equal(captured.replay(), right)
        model(IDS[:, 1:2], past_key_values=cache)
        del cache
        gc.collect()
        for _ in range(3):
            logits(model, use_cache=True)
        assert torch.equal(captured.replay(), right)
        device = devices.require()
        del captured
        gc.collect()
        device.reap(wait=True)
        assert device.snapshot()["pages"]["kv"] == 0


def test_weights_outside_of_layers_stay_until_a_graph_that_reads_them_is_reset(model: Any, manager: Any) -> None:
    with ballonet.manage(model) as managed:
        expected = logits(model)
        manager.clock.now += 5
        assert OUTSIDE_LAYERS in [found.index for found in manager.reclaim.candidates()]
        hidden = torch.ones(1, model.config.hidden_size)
        captured = Captured(lambda: model.lm_head(hidden))
        manager.clock.now += 5
        assert OUTSIDE_LAYERS not in [found.index for found in manager.reclaim.candidates()]
        assert managed._residency.entry(OUTSIDE_LAYERS) is None
        assert torch.equal(captured.replay(), captured.replay())
        captured.graph.reset()
        assert OUTSIDE_LAYERS in [found.index for found in manager.reclaim.candidates()]
        assert torch.equal(logits(model), expected)


def test_weights_outside_of_layers_are_back_before_a_capture(model: Any, manager: Any) -> None:
    with ballonet.manage(model) as managed:
        logits(model)
        manager.clock.now += 5
        assert manager.sources.reclaim(PageSource.IDLE_WEIGHTS, BUDGET // PAGE) > 0
        assert managed._residency.rest.away
        hidden = torch.ones(1, model.config.hidden_size)
        with install.stock():
            expected = functional.linear(hidden, model.lm_head.weight)
        captured = Captured(lambda: model.lm_head(hidden))
        assert not managed._residency.rest.away
        assert torch.allclose(captured.replay(), expected)
