"""Layers that a replica drops and restores: pages exactly, no copy where that was prepared, the same tokens."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator.errors import DropRefused, ManageError, ModelInUse, WeightsFileChanged
from ballonet.hooks.device import governors
from ballonet.hooks.replicas.held_layers import HeldLayers, Prepared, Restored
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.ladder import Rung
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.testing import chaos_of, manage

from .. import graphs
from ..models import Output, build, generate, prompts
from ..pool import bytes_that_exist, take_out
from ..tuned import Clock, Tuned
from ..weights import CHANGES
from .parts import Pipeline, in_one, steps

LAYERS = 6
BUDGET = 2**22
PAGE = 4096
INPUTS = prompts(batch=2, longest=9)
KINDS = ["host", "file"]


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield
    gc.collect()
    runtime.require().check()
    take_out()


@pytest.fixture
def clock(tuned: Tuned) -> Clock:
    found = Clock(step=1e-6)
    tuned(clock=found)
    return found


@pytest.fixture(autouse=True)
def tiny(tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    with install.stock():
        build("llama", num_hidden_layers=LAYERS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def original() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def stock(original: Any) -> Output:
    with install.stock():
        return say(original)


def say(model: Any) -> Output:
    return generate(model, "greedy", INPUTS, tokens=5)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**INPUTS).logits
    return found


def loaded(folder: Path) -> Any:
    with install.stock():
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Where dropped layers lie."""
    return str(request.param)


@pytest.fixture
def model(kind: str, original: Any, folder: Path) -> Any:
    if kind == "file":
        return loaded(folder)
    with install.stock():
        return copy.deepcopy(original)


@pytest.fixture
def managed(model: Any) -> Iterator[ballonet.Managed]:
    with ballonet.manage(model) as it:
        yield it


@pytest.fixture
def held(managed: ballonet.Managed) -> Iterator[HeldLayers]:
    found = HeldLayers(managed)
    yield found
    found.close()


def prepared(held: HeldLayers, layers: int = LAYERS) -> HeldLayers:
    assert len(list(held.prepare(range(layers)))) == layers
    return held


def settled() -> int:
    """Device pages that exist, once all that can go has gone: as the kernel counts them."""
    device = runtime.require()
    gc.collect()
    for _ in range(2):
        device.trim()
        device.reap(wait=True)
    device.check()
    return bytes_that_exist() // PAGE


def on_host() -> int:
    runtime.require().trim()
    return bytes_that_exist("host") // PAGE


def copied(way: str) -> int:
    return int(runtime.require().snapshot()["copied"][f"weights_{way}"])


def pages_of(managed: ballonet.Managed) -> tuple[int, ...]:
    return managed._elastic.arrangement.pages


def test_freed_pages_are_exact_and_nothing_goes_to_the_host(
    kind: str, model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output
) -> None:
    """Counted from outside: the layers' pages, less the slot of the largest; and for a file no host page at all."""
    assert say(model).agrees(stock)
    pages, before = pages_of(managed), on_host()
    assert list(held.prepare([4, 3])) == [Prepared(4, 1, 2), Prepared(3, 2, 2)]
    assert list(held.prepare([3, 4, 5])) == [Prepared(5, 1, 1)]
    assert held.ready == (3, 4, 5)
    assert on_host() - before <= 1 if kind == "file" else on_host() - before == sum(pages[3:])
    assert managed.report().host_pages == (0 if kind == "file" else sum(pages[3:]))
    there, to_host, here = settled(), copied("d2h"), copied("h2d")
    freed = held.drop(Span(0, 3))
    assert freed == sum(pages[3:]) - max(pages[3:])
    assert there - settled() == freed
    assert (copied("d2h"), copied("h2d")) == (to_host, here)
    assert held.dropped == managed.report().streamed == (3, 4, 5)
    assert say(model).agrees(stock), "alone, through the slot"
    assert copied("h2d") > here
    assert copied("d2h") == to_host
    assert [each.layer for each in held.restore([5, 0, 3, 4])] == [5, 3, 4]
    assert (held.dropped, managed.report().streamed) == ((), ())
    assert settled() == there
    assert say(model).agrees(stock)
    assert held.drop(Span(0, 3)) == freed, "it is ready yet"
    assert copied("d2h") == to_host
    assert len(list(held.restore(range(LAYERS)))) == 3


def test_a_cold_drop_prepares_by_itself(model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output) -> None:
    pages = pages_of(managed)
    assert held.drop(Span(2, 4)) == sum(pages) - sum(pages[2:4]) - max(pages[:2] + pages[4:])
    assert held.drop(Span(2, 4)) == 0
    assert held.drop(Span(3, 4)) == pages[2]
    assert held.dropped == (0, 1, 2, 4, 5)
    assert say(model).agrees(stock)


def test_freed_pages_are_kv_s_at_once(managed: ballonet.Managed, held: HeldLayers) -> None:
    prepared(held)
    device = runtime.require()
    settled()
    group, few = device.group(), 4  # pages for whatever torch allocates
    rest = device.reserve((device.available - few) * PAGE, "kv", group)
    rest.map(0, rest.pieces)
    assert device.available == few
    freed = held.drop(Span(0, 3))
    assert managed.report().streamed == held.dropped
    kv = device.reserve(freed * PAGE, "kv", group)
    kv.map(0, freed)
    assert bytes_that_exist() <= BUDGET
    with pytest.raises(torch.OutOfMemoryError, match="no room for layer 3"):
        list(held.restore([3]))
    assert managed.report().streamed == held.dropped == (3, 4, 5)
    kv.close()
    steps = held.restore([3, 4, 5])
    assert [next(steps).layer, next(steps).layer] == [3, 4]
    rest.close()  # until the last has its pages, the slot has some
    assert next(steps).layer == 5


def test_nobody_brings_dropped_layers_home_until_they_are_released(
    model: Any, original: Any, clock: Clock, managed: ballonet.Managed, held: HeldLayers
) -> None:
    """Whatever is free, and for how long; but a layer of the span that pages were short for comes back as ever."""
    governor = governors.of(runtime.require())
    governor.link.bandwidth, expected = 1e12, stocks_logits(original)
    logits(model)
    held.drop(Span(0, 4))
    settled()
    pages = runtime.require().snapshot()["pages"]
    ballonet.set_budget((sum(pages.values()) - pages["free"] - pages_of(managed)[0] // 2) * PAGE, timeout="60s")
    taken = {*managed.report().streamed} - {4, 5}
    ballonet.set_budget(BUDGET)
    assert taken
    for _ in range(12):
        assert torch.equal(logits(model), expected)
        clock.now += DEFAULT.pages.dwell / 2
    assert managed.report().streamed == held.dropped == (4, 5)
    assert governor.ladder.revert(Rung.HIDDEN_WEIGHTS, 10**6) == 0
    assert {each.index for each in governor.reclaim.candidates()}.isdisjoint({4, 5})
    host = managed.report().host_pages
    held.release()
    held.release()
    assert (held.dropped, managed.report().streamed, managed.report().host_pages) == ((), (4, 5), host)
    for _ in range(12):
        assert torch.equal(logits(model), expected)
        clock.now += DEFAULT.pages.dwell / 2
    assert managed.report().streamed == ()


def test_an_slo_that_allows_it_streams_layers_of_the_span_only(model: Any, stock: Output, clock: Clock) -> None:
    """Layers stream for nothing where an SLO allows it: of those that are held."""
    with ballonet.manage(model, tpot_slo="10s", ttft_slo="10s") as managed:
        held = HeldLayers(managed)
        held.drop(Span(1, 5))
        for _ in range(4):
            assert say(model).agrees(stock)
            clock.now += 2 * DEFAULT.pages.forget
        assert {*managed._elastic.plan.streamed} <= {1, 2, 3, 4}
        assert {0, 5} <= {*managed.report().streamed}
        assert held.dropped == (0, 5)
        list(held.restore([0, 5]))
        assert say(model).agrees(stock)


def test_a_stage_copies_nothing_of_what_it_dropped(model: Any, original: Any, stock: Output) -> None:
    """Two replicas that dropped complementary halves run as a pipeline; then one loses its partner and goes on."""
    asked = steps(4)
    with install.stock():
        expected = in_one(copy.deepcopy(original), asked)
        other = copy.deepcopy(model)
    spans = Span(0, 3), Span(3, LAYERS)
    with ballonet.manage(model) as one, ballonet.manage(other) as two, Splice(model) as a, Splice(other) as b:
        them = HeldLayers(one), HeldLayers(two)
        for each in them:
            prepared(each)
        for splice, each, span in zip((a, b), them, spans, strict=True):
            splice.span = span
            each.drop(span)
        here = copied("h2d")
        pipeline = Pipeline([a, b])
        for step, logits_of_it in zip(asked, expected, strict=True):
            assert torch.equal(pipeline.run(step), logits_of_it)
        del pipeline
        assert copied("h2d") == here, "not a byte"
        a.span = a.whole
        assert say(model).agrees(stock), "alone at once"
        assert copied("h2d") > here
        list(them[0].restore([5, 4, 3]))
        here = copied("h2d")
        assert say(model).agrees(stock)
        assert copied("h2d") == here


@pytest.mark.parametrize("seed", [1, 7])
def test_many_cycles_under_chaos_lose_nothing(kind: str, model: Any, original: Any, seed: int) -> None:
    """Spans of any size, restored in any order and not always all; pages move at random, given and taken back."""
    expected = stocks_logits(original)
    spans, before, whole = random.Random(seed), (settled(), on_host()), 0
    with manage(model, chaos=seed) as managed:
        held = HeldLayers(managed)
        assert torch.equal(logits(model), expected)
        prepared(held)
        here, host = settled(), on_host() - managed.report().host_pages
        for cycle in range(24):
            begin = spans.randrange(LAYERS)
            held.drop(Span(begin, spans.randint(begin + 1, LAYERS)))
            assert torch.equal(logits(model), expected), cycle
            order = spans.sample(held.dropped, len(held.dropped))
            for step in held.restore(order[: spans.choice((len(order), len(order) // 2))]):
                assert step.layer not in held.dropped
                assert torch.equal(logits(model), expected), (cycle, step)
            if cycle % 3 == 2:
                list(held.restore(range(LAYERS)))
                if not managed._weights.on_host():  # chaos pulls levers, too
                    whole += 1
                    assert (settled(), on_host() - managed.report().host_pages) == (here, host), cycle
        assert whole > 2
        assert chaos_of(managed).moved["weights"] > 0
        held.close()
        for _ in range(3):
            assert torch.equal(logits(model), expected)
    assert (settled(), on_host()) == before


def stocks_logits(original: Any, act: Callable[[Any], object] = lambda model: None) -> torch.Tensor:
    with install.stock():
        changed = copy.deepcopy(original)
        act(changed)
        return logits(changed)


def _data(model: Any) -> None:
    model.model.layers[4].mlp.up_proj.weight.data.mul_(2)


def _counted(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight.mul_(2)


def _replaced(model: Any) -> None:
    old = model.model.layers[4].mlp.up_proj.weight
    model.model.layers[4].mlp.up_proj.weight = torch.nn.Parameter(old.detach() * 2)


def _merged(model: Any) -> None:
    weight = model.model.layers[4].mlp.up_proj.weight
    weight.data += weight.data.clone()


WRITES = {"data": _data, "counted": _counted, "replaced": _replaced, "merged": _merged}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", ["ready", "dropped", "restored"])
def test_what_is_written_is_never_lost(
    model: Any, original: Any, held: HeldLayers, write: str, when: str, managed: ballonet.Managed
) -> None:
    """Neither to a layer that is ready, of which there are older copies, nor to one that is dropped."""
    expected = stocks_logits(original, WRITES[write])
    assert not torch.equal(expected, stocks_logits(original))
    prepared(held)
    if when != "ready":
        held.drop(Span(0, 3))
        logits(model)
    if when == "restored":
        list(held.restore([3, 4, 5]))
    WRITES[write](model)
    for _ in range(2):
        held.drop(Span(0, 3))
        assert torch.equal(logits(model), expected)
        assert len(list(held.restore([5, 4, 3]))) == 3
        assert torch.equal(logits(model), expected)
    runtime.require().check()


def test_a_layer_that_somebody_refers_to_goes_to_host_pages(
    model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output
) -> None:
    """So that they read what it is, wherever it is, also where they took it after it was ready."""
    weight = model.model.layers[5].mlp.up_proj.weight
    prepared(held)
    other = model.model.layers[4].mlp.up_proj.weight
    before = [weight.detach().clone(), other.detach().clone()]
    held.drop(Span(0, 3))
    pages = pages_of(managed)
    assert managed.report().host_pages >= pages[4] + pages[5]
    assert torch.equal(weight, before[0])
    assert torch.equal(other, before[1])
    assert say(model).agrees(stock)
    assert torch.equal(model.model.layers[4].mlp.up_proj.weight, before[1])
    list(held.restore([3, 4, 5]))
    assert torch.equal(weight, before[0])
    assert say(model).agrees(stock)


# -- peers


class Peer:
    """Another replica, which is asked for layers."""

    def __init__(
        self, original: Any, act: Callable[[int, dict[str, torch.Tensor]], object] = lambda *each: None
    ) -> None:
        self._layers = original.model.layers
        self._act = act
        self.asked: list[int] = []

    def __call__(self, layer: int) -> Mapping[str, torch.Tensor] | None:
        self.asked.append(layer)
        with install.stock():
            found = {name: each.detach().clone() for name, each in self._layers[layer].named_parameters()}
        found |= dict(self._layers[layer].named_buffers())
        return None if self._act(layer, found) == "gone" else found


def test_layers_come_from_a_peer(model: Any, original: Any, held: HeldLayers, stock: Output) -> None:
    """Next-needed first; nothing comes over from the backing."""
    prepared(held)
    held.drop(Span(2, 4))
    here, peer = copied("h2d"), Peer(original)
    found = list(held.restore([4, 5, 0, 1], peer))
    assert [(each.layer, each.from_peer) for each in found] == [(4, True), (5, True), (0, True), (1, True)]
    assert peer.asked == [4, 5, 0, 1]
    assert copied("h2d") == here
    assert say(model).agrees(stock)
    held.drop(Span(2, 4))
    assert say(model).agrees(stock)


def test_a_peer_s_wrong_bytes_are_not_taken(model: Any, original: Any, held: HeldLayers, stock: Output) -> None:
    """One bit of one weight, two that changed places, another's layer; nor does one that is gone keep a layer away."""

    def one_bit(layer: int, found: dict[str, torch.Tensor]) -> None:
        found["mlp.down_proj.weight"].view(torch.uint8).view(-1)[-1] ^= 1

    def exchanged(layer: int, found: dict[str, torch.Tensor]) -> None:
        rows = found["mlp.down_proj.weight"]
        rows[[0, 1]] = rows[[1, 0]]

    def another(layer: int, found: dict[str, torch.Tensor]) -> None:
        found.update(Peer(original)((layer + 1) % LAYERS) or {})

    def gone(layer: int, found: dict[str, torch.Tensor]) -> str:
        return "gone"

    prepared(held)
    for act in (one_bit, exchanged, another, gone):
        held.drop(Span(0, 4))
        found = list(held.restore([4, 5], Peer(original, act)))
        assert found == [Restored(each.layer, each.pages, False) for each in found]
        assert len(found) == 2
        assert say(model).agrees(stock), act


def test_a_peer_s_other_tensors_are_refused_and_what_it_raises_is_raised(
    model: Any, original: Any, held: HeldLayers, stock: Output
) -> None:
    def half(layer: int, found: dict[str, torch.Tensor]) -> None:
        found["mlp.down_proj.weight"] = found["mlp.down_proj.weight"].half()

    def lacks(layer: int, found: dict[str, torch.Tensor]) -> None:
        del found["mlp.down_proj.weight"]

    def fails(layer: int, found: dict[str, torch.Tensor]) -> None:
        raise ConnectionError("the link is lost")

    held.drop(Span(0, 4))
    for act, error, text in (
        (half, ManageError, "lacks, or has in other shapes or dtypes: mlp.down_proj.weight"),
        (lacks, ManageError, "lacks, or has in other shapes or dtypes: mlp.down_proj.weight"),
        (fails, ConnectionError, "lost"),
    ):
        with pytest.raises(error, match=text):
            list(held.restore([4, 5], Peer(original, act)))
        assert held.dropped == (4, 5)
        assert say(model).agrees(stock)
        settled()
    assert [each.from_peer for each in held.restore([4, 5], Peer(original))] == [True, True]


def test_a_peer_that_has_older_weights_than_were_written_here_is_not_taken(
    model: Any, original: Any, held: HeldLayers
) -> None:
    expected = stocks_logits(original, _data)
    prepared(held)
    held.drop(Span(0, 3))
    _data(model)
    assert [each.from_peer for each in held.restore([3, 4, 5], Peer(original))] == [True, False, True]
    assert torch.equal(logits(model), expected)


# -- files


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
        os.utime(tmp_path / each.name, ns=(10**18, 10**18))
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_has_changed_drops_nothing(own_folder: Path, stock: Output, change: str) -> None:
    """A typed error before anything is changed; what is made ready after that has host pages, unless the bytes are the
    same."""
    model = loaded(own_folder)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed))
        assert managed.report().host_pages == 0
        here = settled()
        CHANGES[change](own_folder / "model.safetensors")
        with pytest.raises(WeightsFileChanged):
            held.drop(Span(0, 3))
        assert (held.dropped, settled()) == ((), here)
        assert say(model).agrees(stock)
        pages = pages_of(managed)
        assert held.drop(Span(0, 3)) == sum(pages[3:]) - max(pages)
        assert say(model).agrees(stock)
        list(held.restore([3, 4, 5]))
        assert say(model).agrees(stock)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_layers_are_dropped(
    own_folder: Path, original: Any, stock: Output, change: str
) -> None:
    """Nobody computes with it or restores from it; a peer does instead."""
    model = loaded(own_folder)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed))
        held.drop(Span(0, 3))
        CHANGES[change](own_folder / "model.safetensors")
        if change not in ("emptied", "halved", "shorter"):  # from which the stand-in refuses to copy
            with pytest.raises(WeightsFileChanged):
                say(model)
        with pytest.raises(WeightsFileChanged):
            list(held.restore([3]))
        with pytest.raises(WeightsFileChanged):
            list(held.restore([3], lambda layer: None))
        assert held.dropped == (3, 4, 5)
        assert [each.from_peer for each in held.restore([3, 4, 5], Peer(original))] == [True] * 3
        assert say(model).agrees(stock)
        with pytest.raises(WeightsFileChanged):
            held.drop(Span(0, 3))
        assert say(model).agrees(stock)
        held.close()


# -- refusals


def test_without_host_pages_nothing_is_dropped(original: Any, stock: Output) -> None:
    with install.stock():
        model = copy.deepcopy(original)
    device = runtime.require()
    with ballonet.manage(model) as managed:
        held = HeldLayers(managed)
        pages, here = pages_of(managed), settled()
        left = pages[3] + pages[4] + pages[5] // 2
        now = device.snapshot()
        filler = device.reserve(BUDGET - (now["host_pages"] - now["host_free"] + left) * PAGE, "kv", device.group())
        filler.map_host(0, filler.pieces)
        try:
            for _ in range(2):
                with pytest.raises(DropRefused, match=r"layer 5 of .* no host pages"):
                    held.drop(Span(0, 3))
                assert (held.dropped, held.ready, settled()) == ((), (3, 4), here)
                assert say(model).agrees(stock)
        finally:
            filler.close()
            device.reap(wait=True)
        assert held.drop(Span(0, 3)) == sum(pages[3:]) - max(pages)
        assert say(model).agrees(stock)


def test_what_cannot_be_dropped_is_refused(model: Any, managed: ballonet.Managed, held: HeldLayers) -> None:
    for span in (Span(2, LAYERS + 1), Span(LAYERS, LAYERS + 1)):
        with pytest.raises(ManageError, match="are none of it"):
            held.drop(span)
    failed: list[BaseException] = []

    def within(*_: object) -> None:
        for act in (lambda: held.drop(Span(0, 3)), held.release, lambda: list(held.restore([5]))):
            try:
                act()
            except ModelInUse as error:
                failed.append(error)

    held.drop(Span(0, 5))
    handle = model.model.layers[0].register_forward_pre_hook(within)
    logits(model)
    handle.remove()
    assert len(failed) == 3
    assert held.dropped == (5,)
    fixed = build("llama", num_hidden_layers=1)
    with ballonet.manage(fixed, interval=1) as other, pytest.raises(ManageError, match="interval=1"):
        HeldLayers(other)


def test_a_model_that_is_managed_no_more_has_nothing_to_drop(model: Any, stock: Output) -> None:
    managed = ballonet.manage(model)
    held = HeldLayers(managed)
    held.drop(Span(0, 3))
    managed.release()
    assert say(model).agrees(stock)
    assert held.dropped == ()
    for act in (lambda: held.drop(Span(0, 3)), lambda: list(held.prepare([0]))):
        with pytest.raises(ManageError, match="managed no more"):
            act()
    assert list(held.restore([3])) == []
    held.close()


def test_layers_in_cuda_graphs_are_not_dropped(original: Any, stock: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.pretend(monkeypatch)
    with install.stock():
        model = copy.deepcopy(original)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed))
        graph = torch.cuda.CUDAGraph()
        with graphs.capture(graph):
            logits(model)
        here = settled()
        with pytest.raises(ManageError):
            held.drop(Span(0, 3))
        assert (held.dropped, settled()) == ((), here)
        del graph
        gc.collect()
        held.drop(Span(0, 3))
        assert say(model).agrees(stock)


def test_layers_of_several_sizes_share_a_slot_of_the_largest() -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=4)
        for layer, factor in zip(model.model.layers, (1, 3, 2, 1), strict=True):
            mlp = layer.mlp
            for name in ("gate_proj", "up_proj", "down_proj"):
                old = getattr(mlp, name)
                wide = (old.in_features, old.out_features * factor)
                wide = (old.in_features * factor, old.out_features) if name == "down_proj" else wide
                new = torch.nn.Linear(*wide, bias=False)
                torch.nn.init.normal_(new.weight, std=0.05)
                setattr(mlp, name, new)
        expected = logits(model)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed), 4)
        pages = pages_of(managed)
        assert len(set(pages)) == 3
        there = settled()
        for kept in range(4):
            gone = [pages[layer] for layer in range(4) if layer != kept]
            assert held.drop(Span(kept, kept + 1)) == there - settled() == sum(gone) - max(gone)
            assert torch.equal(logits(model), expected)
            list(held.restore(range(4)))
            assert settled() == there


# -- other threads


def test_generate_goes_on_beside_it(model: Any, held: HeldLayers, stock: Output, original: Any) -> None:
    """Another thread generates all the time: what it says is right, and no call of it fails."""
    done, failed, said = threading.Event(), list[BaseException](), 0

    def ask() -> None:
        nonlocal said
        try:
            while not done.is_set():
                assert say(model).agrees(stock)
                said += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        prepared(held)
        for cycle in range(6):
            held.drop(Span(cycle % 3, cycle % 3 + 2))
            before = said
            while said < before + 2 and not failed:
                assert not done.wait(0.01)
            list(held.restore(held.dropped, Peer(original) if cycle % 2 else None))
    finally:
        done.set()
        thread.join(120)
    assert not failed, failed
    assert said >= 12
    assert held.dropped == ()


def test_a_wish_comes_to_whoever_offered(held: HeldLayers, managed: ballonet.Managed) -> None:
    wishes: list[int] = []
    governor, pages = governors.of(runtime.require()), pages_of(managed)
    held.offer(lambda pages: wishes.append(-pages))
    held.offer(wishes.append)
    governor.duplicates.wish(7)
    assert wishes == [7]
    assert governor.duplicates.pages == sum(pages) - pages[0] - max(pages)
    held.drop(Span(0, 1))
    assert governor.duplicates.pages == 0
    held.close()
    governor.duplicates.wish(7)
    assert wishes == [7]


def test_a_forward_that_finds_no_pages_leads_to_a_wish(original: Any, tuned: Tuned) -> None:
    """Nothing else can give any, as the model has a floor: a cache grows until there are none, and a drop has some."""
    tuned(waiting={"room": 0.1})
    with install.stock():
        model = copy.deepcopy(original)
        ids = torch.arange(2 * 8).reshape(2, 8)
        expected = logits_of(model, ids)
    device, wishes = runtime.require(), list[int]()
    with ballonet.manage(model, floor=BUDGET // 2) as managed:
        held = prepared(HeldLayers(managed))
        held.offer(wishes.append)
        cache = ballonet.KVCache(model.config)
        logits_of(model, ids, cache)
        settled()
        filler = device.reserve((device.available - 40) * PAGE, "kv", device.group())
        filler.map(0, filler.pieces)
        with pytest.raises(torch.OutOfMemoryError):
            _ = [logits_of(model, ids, cache) for _ in range(64)]
        del cache
        gc.collect()
        assert torch.equal(logits_of(model, ids), expected)  # at the latest: an operator cannot tell of it
        assert wishes
        assert min(wishes) > 0
        freed = held.drop(Span(2, 3))
        assert freed >= sum(wishes)
        assert torch.equal(logits_of(model, ids), expected)
        filler.close()
        held.close()


def logits_of(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, past_key_values=cache, use_cache=cache is not None).logits
    return found


def test_a_drop_is_an_event_of_rung_7(held: HeldLayers) -> None:
    def moved(verb: str) -> int:
        counts = runtime.of().events.counts().get("duplicates", {})
        return counts[verb].pages if verb in counts else 0

    def others() -> dict[str, Any]:
        return {name: each for name, each in runtime.of().events.counts().items() if "weights" in name}

    before, rest = (moved("pull"), moved("revert")), others()
    freed = held.drop(Span(0, 3))
    home = sum(each.pages for each in held.restore([3, 4, 5]))
    assert (moved("pull") - before[0], moved("revert") - before[1]) == (freed, home)
    assert others() == rest
