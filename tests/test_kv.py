"""The elastic layer against transformers' own: same tensors after any calls, in memory that is where it should be."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from transformers.cache_utils import DynamicLayer

from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.allocator.errors import NotInstalled
from ballonet.hooks.forward.lease import ForwardLease, current
from ballonet.hooks.kv import pages
from ballonet.hooks.kv import ranges as kv_range
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges

from .caches import kv_pages
from .kv.pressure import hog, started
from .pool import bytes_that_exist, in_pool

PAGE = 4096
BUDGET = 192 * PAGE
HOST = 512  # pages
BATCH, HEADS, K_DIM, V_DIM = 2, 3, 8, 4  # 288 bytes per token in float32: a page holds 14


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Device]:
    with started(budget=BUDGET, host_budget=HOST * PAGE, page_size=PAGE) as opened:
        yield opened


@pytest.fixture
def full_host(device: Device) -> Iterator[None]:
    """The host has no page to give."""
    gc.collect()
    device.reap(wait=True)
    other = hog(device, HOST, "host")
    yield
    other.close()


def tokens(count: int, seed: int = 0, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, count, HEADS, K_DIM, generator=generator).transpose(1, 2).to(dtype)
    return keys, torch.randn(batch, HEADS, count, V_DIM, generator=generator).to(dtype)


def same(elastic: Any, stock: Any) -> None:
    assert elastic.get_seq_length() == stock.get_seq_length()
    assert elastic.is_initialized == stock.is_initialized
    assert elastic.get_mask_sizes(3) == stock.get_mask_sizes(3)
    assert elastic.get_max_length() == stock.get_max_length() == -1
    if stock.get_seq_length():
        assert torch.equal(elastic.keys, stock.keys)
        assert torch.equal(elastic.values, stock.values)
        assert (elastic.keys.dtype, elastic.values.dtype) == (stock.keys.dtype, stock.values.dtype)
        assert elastic.device == stock.device


class Twins(RuleBasedStateMachine):
    """Two layers that share ranges, each beside a stock layer to which the same is done; and views that are held all
    along.
    """

    group = 2

    @initialize(expected=st.sampled_from([1, 200]))
    def begin(self, expected: int) -> None:
        ranges = CacheRanges(layers=self.group, expected=expected)
        self.pairs: list[tuple[Any, Any]] = [(ElasticLayer(ranges), DynamicLayer()) for _ in range(self.group)]
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.seed = 0
        self.batch = [BATCH] * self.group

    which = st.integers(0, group - 1)

    @rule(which=which, count=st.one_of(st.just(1), st.integers(1, 40)), inference=st.booleans())
    def update(self, which: int, count: int, inference: bool) -> None:
        self.seed += 1
        new = tokens(count, self.seed, self.batch[which])
        elastic, stock = self.pairs[which]
        with torch.inference_mode() if inference else torch.no_grad():
            ours, theirs = elastic.update(*new), stock.update(*new)
        assert elastic.elastic
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])

    @rule(which=which)
    def update_with_gradients(self, which: int) -> None:
        self.seed += 1
        keys, values = tokens(1, self.seed, self.batch[which])
        elastic, stock = self.pairs[which]
        if stock.is_initialized and stock.keys.is_inference():
            return  # what torch itself refuses
        weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
        for layer, weight in zip((elastic, stock), weights, strict=True):
            k, v = layer.update(keys * weight, values)
            (k.sum() + v.sum()).backward()
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        assert torch.equal(*(weight.grad for weight in weights))

    @rule(which=which, count=st.integers(0, 50))
    def crop(self, which: int, count: int) -> None:
        for layer in self.pairs[which]:
            if layer.is_initialized and layer.keys.dim() == 4:  # else stock fails
                layer.crop(-count)

    @rule(which=which, data=st.data())
    def reorder(self, which: int, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.batch[which] - 1), min_size=1, max_size=4))
        if data.draw(st.booleans()):
            rows = (rows * self.batch[which])[: self.batch[which]]
        if self.pairs[which][1].get_seq_length():
            self.batch[which] = len(rows)
        for layer in self.pairs[which]:
            layer.reorder_cache(torch.tensor(rows))

    @rule(which=which, repeats=st.integers(1, 2))
    def repeat(self, which: int, repeats: int) -> None:
        if self.batch[which] > 4:
            return
        if self.pairs[which][1].get_seq_length():
            self.batch[which] *= repeats
        for layer in self.pairs[which]:
            layer.batch_repeat_interleave(repeats)

    @rule(which=which, data=st.data())
    def select(self, which: int, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.batch[which] - 1), min_size=1, max_size=3))
        if self.pairs[which][1].get_seq_length():
            self.batch[which] = len(rows)
        for layer in self.pairs[which]:
            layer.batch_select_indices(torch.tensor(rows))

    @rule(which=which, data=st.data())
    def select_by_mask(self, which: int, data: st.DataObject) -> None:
        mask = data.draw(st.lists(st.booleans(), min_size=self.batch[which], max_size=self.batch[which]).filter(any))
        if self.pairs[which][1].get_seq_length():
            self.batch[which] = sum(mask)
        for layer in self.pairs[which]:
            layer.batch_select_indices(torch.tensor(mask))

    @rule(which=which)
    def update_with_nothing(self, which: int) -> None:
        keys, values = tokens(1, 0, self.batch[which])
        for layer in self.pairs[which]:
            if layer.get_seq_length():
                layer.update(keys[:, :, :0], values[:, :, :0])

    @rule(which=which)
    def initialize_early(self, which: int) -> None:
        for layer in self.pairs[which]:
            if not layer.is_initialized:
                layer.lazy_initialization(*tokens(0, 0, self.batch[which]))

    @rule(which=which, place=st.sampled_from(["device", "host"]), data=st.data())
    def move_a_page(self, which: int, place: Any, data: st.DataObject) -> None:
        """What chaos does."""
        elastic, _ = self.pairs[which]
        if elastic.elastic:
            it = elastic._range.range
            if backed := [piece for piece in range(it.backed) if it.leads_to(piece) != "none"]:
                it.move(data.draw(st.sampled_from(backed)), place)

    @rule(which=which)
    def reset(self, which: int) -> None:
        elastic, stock = self.pairs[which]
        elastic.reset()
        stock.reset()
        self.batch[which] = BATCH

    @rule(which=which, values=st.booleans(), whole=st.booleans())
    def hold(self, which: int, values: bool, whole: bool) -> None:
        elastic, _ = self.pairs[which]
        view = elastic.values if values else elastic.keys
        if view is not None and view.dim() == 4:
            view = view if whole else view[0, :, -1:]
            self.held.append((view, view.clone()))

    @rule()
    def let_go(self) -> None:
        self.held.clear()

    @rule(which=which, how=st.sampled_from(["deepcopy", "copy", "pickle"]))
    def replace_by_copy(self, which: int, how: str) -> None:
        elastic, stock = self.pairs[which]
        ways = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
        twin = ways[how](elastic)
        same(twin, stock)
        twin.update(*tokens(2, 5, self.batch[which]))
        same(elastic, stock)
        self.pairs[which] = (copy.deepcopy(elastic), stock)

    @rule(which=which, count=st.integers(1, 5))
    def assign(self, which: int, count: int) -> None:
        """What programs that thin out a cache do."""
        for layer in self.pairs[which]:
            if layer.get_seq_length():
                layer.keys = layer.keys[:, :, ::count]
                layer.values = layer.values[:, :, ::count]

    @rule(which=which)
    def offload_and_prefetch(self, which: int) -> None:
        for layer in self.pairs[which]:
            layer.offload()
            layer.prefetch()

    @invariant()
    def same(self) -> None:
        for elastic, stock in self.pairs:
            same(elastic, stock)
        for view, before in self.held:
            assert torch.equal(view, before)

    def teardown(self) -> None:
        self.pairs = []
        self.held = []
        assert kv_pages(devices.require()) == 0
        devices.require().check()


def test_any_sequence_of_calls_equals_stock() -> None:
    run_state_machine_as_test(Twins, settings=settings(max_examples=50, stateful_step_count=25, deadline=None))


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    elastic, expected = ElasticLayer(), []
    for seed, count in enumerate((5, 1, 30)):
        keys, values = tokens(count, seed, dtype=dtype)
        elastic.update(keys, values)
        expected.append(keys)
    assert elastic.elastic
    assert torch.equal(elastic.keys.view(torch.uint8), torch.cat(expected, dim=2).contiguous().view(torch.uint8))


def test_the_tokens_lie_in_the_pool_and_pages_come_and_go_with_them(device: Device) -> None:
    before, existed = kv_pages(device), bytes_that_exist()
    layer = ElasticLayer()
    layer.update(*tokens(1))
    for tensor in (layer.keys, layer.values):
        assert in_pool(tensor)
        assert tensor.untyped_storage().nbytes() == PAGE  # not one byte that is not mapped
    del tensor
    assert kv_pages(device) == before + 1
    layer.update(*tokens(60))
    per_token = BATCH * HEADS * (K_DIM + V_DIM) * 4
    assert kv_pages(device) == before - (-61 * per_token // PAGE)
    assert bytes_that_exist() >= existed
    assert torch.equal(layer.keys[:, :, 1:], tokens(60)[0])
    layer.crop(-60)
    assert kv_pages(device) == before + 1
    layer.crop(-1)
    assert kv_pages(device) == before
    layer.update(*tokens(3, 9))
    assert torch.equal(layer.keys, tokens(3, 9)[0])
    layer.reset()
    assert kv_pages(device) == before


def test_growth_copies_nothing_and_maps_a_page_at_a_time(device: Device) -> None:
    layer = ElasticLayer()
    device.trim()  # and no cached range of a cache that is gone
    layer.update(*tokens(1))
    place = layer.keys.data_ptr()
    maps = device.snapshot()["driver_calls"].get("cuMemMap", 0)
    for seed in range(100):
        layer.update(*tokens(1, seed))
    assert layer.keys.data_ptr() == place
    per_token = BATCH * HEADS * (K_DIM + V_DIM) * 4
    assert device.snapshot()["driver_calls"]["cuMemMap"] - maps == -(-101 * per_token // PAGE) - 1


def test_layers_share_pages_when_pages_of_their_own_would_be_mostly_empty(device: Device) -> None:
    before = kv_pages(device)
    shared = [ElasticLayer(ranges) for ranges in [CacheRanges(layers=6, expected=2)] * 6]
    for seed, layer in enumerate(shared):
        layer.update(*tokens(2 + seed, seed))
    assert kv_pages(device) == before + -(-7 * 6 * BATCH * HEADS * (K_DIM + V_DIM) * 4 // PAGE)
    apart = [ElasticLayer(ranges) for ranges in [CacheRanges(layers=6, expected=2, alone=True)] * 6]
    middle = kv_pages(device)
    for seed, layer in enumerate(apart):
        layer.update(*tokens(2 + seed, seed))
    assert kv_pages(device) == middle + 6
    for one, other in zip(shared, apart, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_a_view_from_before_a_crop_keeps_its_content_and_costs_nothing_when_there_is_none() -> None:
    layer = ElasticLayer()
    layer.update(*tokens(20))
    place = layer.keys.data_ptr()
    layer.crop(-5)
    layer.update(*tokens(5, 1))
    assert layer.keys.data_ptr() == place  # nobody looked: in place
    view = layer.values[1:, :, -1]
    before = view.clone()
    layer.crop(-5)
    layer.update(*tokens(5, 2))
    assert torch.equal(view, before)
    assert layer.keys.data_ptr() != place
    assert torch.equal(layer.keys, torch.cat([tokens(20)[0][:, :, :15], tokens(5, 2)[0]], dim=2))


def test_a_view_outlives_its_layer(device: Device) -> None:
    before = kv_pages(device)
    layer = ElasticLayer()
    layer.update(*tokens(20))
    view = layer.keys
    del layer
    assert torch.equal(view, tokens(20)[0])
    assert kv_pages(device) > before
    del view
    assert kv_pages(device) == before


@pytest.mark.usefixtures("full_host")
@pytest.mark.parametrize("helps", [True, False])
def test_memory_cached_by_torch_is_asked_for_before_giving_up(
    device: Device, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, layer = ElasticLayer(), ElasticLayer()
    other.update(*tokens(1500))
    asked: list[bool] = []

    def reclaim() -> bool:
        asked.append(True)
        if helps:
            other.reset()
        return helps

    monkeypatch.setattr(pages, "reclaim", reclaim)
    layer.update(*tokens(20))
    assert not asked
    if helps:
        layer.update(*tokens(1500, 1))
        assert torch.equal(layer.keys[:, :, 20:], tokens(1500, 1)[0])
    else:
        with pytest.raises(torch.OutOfMemoryError, match="KV cache") as caught:
            layer.update(*tokens(1500, 1))
        assert caught.value.__cause__ is not None
        assert layer.get_seq_length() == 20
    assert len(asked) == 1


@pytest.mark.usefixtures("full_host")
def test_a_cache_that_only_a_traceback_holds_is_collected_before_giving_up(device: Device) -> None:
    def interrupted() -> None:
        other = ElasticLayer()
        other.update(*tokens(1500))
        raise KeyboardInterrupt

    layer, held = ElasticLayer(), []
    gc.disable()
    try:
        try:
            interrupted()
        except KeyboardInterrupt as error:
            held += [error, held]  # a circle, as notebooks and debuggers make them
        del held
        layer.update(*tokens(1500, 1))
    finally:
        gc.enable()
    assert torch.equal(layer.keys, tokens(1500, 1)[0])


def test_tensors_that_do_not_fit_are_refused_as_stock_refuses_them() -> None:
    layer, stock = ElasticLayer(), DynamicLayer()
    for cache in (layer, stock):
        cache.update(*tokens(20))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            cache.update(*tokens(1, batch=1))  # a copy in place would have broadcast it
    same(layer, stock)
    for cache in (layer, stock):
        cache.update(*tokens(1, 4, dtype=torch.float64))  # promoted
    same(layer, stock)
    assert not layer.elastic


@pytest.mark.parametrize("held", [0, 20])
def test_keys_and_values_of_different_types_are_those_of_stock(held: int) -> None:
    """transformers 5.23 promotes such values, later ones keep their type."""
    layer, stock = ElasticLayer(), DynamicLayer()
    for cache in (layer, stock):
        if held:
            cache.update(*tokens(held))
        for count in (5, 1):
            keys, values = tokens(count, count)
            cache.update(keys, values.to(torch.bfloat16))
        cache.reorder_cache(torch.arange(BATCH).flip(0))
        cache.crop(-2)
    assert not layer.elastic
    same(layer, stock)


def test_autograd_does_not_take_appending_for_a_change() -> None:
    layer = ElasticLayer()
    keys, _ = layer.update(*tokens(20))
    query = torch.ones(BATCH, HEADS, 1, K_DIM, requires_grad=True)
    scores = query @ keys.transpose(2, 3)
    layer.update(*tokens(5, 1))
    layer.crop(-10)
    del keys
    layer.update(*tokens(5, 2))
    scores.sum().backward()
    assert torch.allclose(query.grad, tokens(20)[0].sum(dim=2, keepdim=True))


def test_a_layer_that_is_not_on_the_installed_device_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = ElasticLayer()
    meta.update(*(part.to("meta") for part in tokens(20)))
    assert not meta.elastic
    assert meta.get_seq_length() == 20
    monkeypatch.setattr(devices, "current", lambda number: None)
    layer, stock = ElasticLayer(), DynamicLayer()
    for cache in (layer, stock):
        cache.update(*tokens(20))
    assert not layer.elastic
    same(layer, stock)


def test_more_tokens_than_kernels_can_index_go_to_the_stock_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_range, "longest", lambda *sizes: 25)
    layer, stock = ElasticLayer(), DynamicLayer()
    for count, elastic in ((20, True), (5, True), (1, False), (1, False)):
        for cache in (layer, stock):
            cache.update(*tokens(count, count))
        assert layer.elastic == elastic
        same(layer, stock)


def test_kv_cache_without_install_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda number: None)
    with pytest.raises(NotInstalled, match="install"):
        KVCache()


def test_an_append_is_inside_a_lease() -> None:
    ranges = CacheRanges(layers=2, expected=1)
    layers = [ElasticLayer(ranges) for _ in range(2)]
    group = ranges.group(devices.require())
    assert current() is None
    layers[0].update(*tokens(1))
    assert group.leases == 1  # this thread's, between its calls
    lease = ForwardLease().open()
    for layer in layers:
        layer.update(*tokens(1))
    assert current() is lease
    assert group.leases == 1
    inner = ForwardLease().open()
    layers[0].update(*tokens(1))
    assert group.leases == 2
    inner.close()
    assert (current(), group.leases) == (lease, 1)
    lease.close()
    lease.close()
    assert (current(), group.leases) == (None, 0)


def test_leases_that_are_closed_out_of_order() -> None:
    """An interrupted forward's may be closed while another runs."""
    group = CacheRanges().group(devices.require())
    outer, inner = ForwardLease().open(), ForwardLease().open()
    for lease in (outer, inner):
        lease.enter_group(group)
    outer.close()
    assert (current(), group.leases) == (inner, 1)
    inner.close()
    assert (current(), group.leases) == (None, 0)
