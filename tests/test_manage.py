"""`manage()` and `release()`: where weights lie, that nothing else about a model changes, that no page is lost."""

from __future__ import annotations

import copy
import gc
import io
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator._native import Device
from ballonet.allocator.errors import AlreadyManaged, BudgetError, ConfigError, ManageError, WrongDevice
from ballonet.hooks.weights.storages import members, survey
from ballonet.testing import chaos_of

from . import models
from .pool import bytes_that_exist, in_pool, installing, mapped
from .portrait import Portrait, all_in_pool, bits, none_in_pool, tensors

BUDGET = 96 * 2**20
PAGE = 64 * 2**10
WIDE = {"hidden_size": 256, "intermediate_size": 1100}  # the MLP's matrices are above 1 MiB, the others are not


@pytest.fixture
def install() -> Iterator[Callable[[], Device]]:
    with installing(BUDGET, PAGE) as now:
        yield now


@pytest.fixture
def device(install: Callable[[], Device]) -> Device:
    return install()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**models.prompts(2, 9)).logits
    return found


# Where the weights lie


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom", "falcon"])
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_every_weight_lies_in_the_memfd_and_comes_back_whole(
    install: Callable[[], Device], architecture: str, loaded: str
) -> None:
    if loaded == "after":
        install()
    model = models.build(architecture)
    expected = logits(model)
    before = Portrait(model)
    install()
    managed = ballonet.manage(model)
    assert all_in_pool(model)
    assert before.is_of(model, hooks=False)
    assert torch.equal(logits(model), expected)
    managed.release()
    assert none_in_pool(model)
    assert before.is_of(model)
    assert torch.equal(logits(model), expected)
    pages = ballonet.stats().pages
    assert (pages.weights, pages.retiring) == (0, 0)


def test_each_layer_has_pages_of_its_own_and_the_rest_shares_the_resident_ones(device: Device) -> None:
    model = models.build("llama", **WIDE)
    with ballonet.manage(model) as managed:
        assert all(len(of_layer) == 1 for of_layer in managed._weights.ranges.values())
        ranges = {layer: of_layer[0] for layer, of_layer in managed._weights.ranges.items()}
        used: dict[int | None, set[int]] = {layer: set() for layer in ranges}
        for name, tensor in tensors(model).items():
            assert tensor.data_ptr() % 512 == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            layer = int(name.split(".")[2]) if ".layers." in name and tensor.nbytes >= 2**20 else None
            first = tensor.data_ptr() - ranges[layer].address
            assert 0 <= first <= first + tensor.nbytes <= ranges[layer].nbytes
            used[layer].update(range(first // PAGE, (first + tensor.nbytes - 1) // PAGE + 1))
        assert ranges.keys() == {None, 0, 1, 2}
        assert {layer: len(pages) for layer, pages in used.items()} == {at: r.pieces for at, r in ranges.items()}
        assert sum(map(len, used.values())) == managed.report().pages
        assert ballonet.stats().pages.weights == managed.report().pages
        assert bytes_that_exist() >= managed.report().pages * PAGE


def test_moving_in_never_takes_more_than_the_weights_and_one_layer(device: Device) -> None:
    model = models.build("llama", **WIDE)  # in the pool, as activations
    device.trim()
    before = bytes_that_exist()
    step = max(sum(weight.nbytes for weight in part.parameters()) for part in [*model.model.layers, model.lm_head])
    assert step + 4 * PAGE < sum(tensor.nbytes for tensor in tensors(model).values()) // 2
    device.reset_peaks()
    with ballonet.manage(model):
        assert device.snapshot()["physical_peak"] <= before + step + 4 * PAGE


def test_pages_are_conserved_and_the_memfd_shrinks(device: Device) -> None:
    model = models.build("llama", **WIDE)
    weights = sum(tensor.nbytes for tensor in tensors(model).values())
    before = bytes_that_exist()
    managed = ballonet.manage(model)
    during = bytes_that_exist()
    assert abs(during - before) <= 8 * PAGE  # from activations of the pool to weights of the pool
    snapshot = device.snapshot()
    assert sum(snapshot["pages"].values()) == snapshot["created"]
    managed.release()
    assert bytes_that_exist() <= during - weights
    snapshot = device.snapshot()
    assert sum(snapshot["pages"].values()) == snapshot["created"]
    assert snapshot["pages"]["weights"] == 0


class Watch:
    """The most bytes that the memfd held, looked at as often as another thread gets to."""

    def __enter__(self) -> Watch:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, bytes_that_exist())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_moving_takes_the_weights_and_one_layer(install: Callable[[], Device], loaded: str) -> None:
    layers = 8
    if loaded == "after":
        install()
    model = models.build("llama", num_hidden_layers=layers, **WIDE)
    device = install()
    weights = sum(tensor.nbytes for tensor in tensors(model).values())
    layer = sum(tensor.nbytes for tensor in tensors(model.model.layers[0]).values())
    others = bytes_that_exist() - (weights if loaded == "after" else 0)
    device.reset_peaks()
    with Watch() as watch:
        managed = ballonet.manage(model)
    slack = (layers + 4) * PAGE  # ends of ranges
    limit = others + weights + slack + (layer if loaded == "after" else 0)
    assert weights <= device.snapshot()["physical_peak"] <= limit
    assert watch.most <= limit
    device.reset_peaks()
    managed.release()
    assert device.snapshot()["physical_peak"] <= others + weights + slack


# What a model is made of


class Oddities(nn.Module):
    """Tensors of every kind that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        shared = torch.randn(100)
        # As safetensors makes them of a mapped file: storages of their own over the same memory.
        file = torch.randn(100).untyped_storage()
        halves = [torch.empty(0).set_(file[first:end], 0, (60,)) for first, end in ((0, 240), (160, 400))]
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.frozen = nn.Parameter(torch.randn(5, 5).bfloat16(), requires_grad=False)
        self.tied = self.frozen
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.slice = nn.Parameter(torch.randn(40, 8)[7:11, 2:5])
        for name, tensor in {
            "window": shared[10:20],
            "overlapping": shared[15:60:3],
            "apart": shared[90:95],
            "mapped": halves[0],
            "mapped_too": halves[1],
            "expanded": torch.randn(1, 5).expand(7, 5),
            "fp8": torch.randn(33).to(torch.float8_e4m3fn),
            "mask": torch.rand(17) > 0.5,
            "complex": torch.randn(9, dtype=torch.complex64),
            "conjugate": torch.randn(9, dtype=torch.complex64).conj(),
            "imaginary": torch.randn(9, dtype=torch.complex64).conj().imag,
            "integers": torch.arange(5, dtype=torch.int16),
            "doubles": torch.tensor([float("nan"), -0.0, 1e-300], dtype=torch.float64),
            "empty": torch.empty(0, 3),
        }.items():
            self.register_buffer(name, tensor, persistent=name != "mask")
        self.linear = nn.Linear(3, 3)
        self.again = self.linear
        self.lstm = nn.LSTM(8, 8, 2)
        self.sparse: torch.Tensor
        self.register_buffer("sparse", torch.eye(3).to_sparse())


def test_every_kind_of_tensor_keeps_its_values_its_strides_and_its_ties(device: Device) -> None:
    model = Oddities()
    before = Portrait(model)
    managed = ballonet.manage(model)
    assert list(managed.report().unmanaged_tensors) == ["sparse"]
    assert before.is_of(model, hooks=False)
    now = mapped()
    for name, tensor in tensors(model).items():
        if name not in ("sparse", "empty"):
            assert in_pool(tensor, now), name
    assert model.tied is model.frozen
    for state in ("managed", "released"):
        model.window[5:6] = 77.0 if state == "managed" else 78.0
        assert model.overlapping[0] == model.window[5]
        assert model.apart.untyped_storage().data_ptr() == model.window.untyped_storage().data_ptr()
        model.mapped[45] = model.window[5]
        assert model.mapped_too[5] == model.window[5]
        model.expanded[0, 0] = model.window[5]
        assert model.expanded[6, 0] == model.window[5]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of an LSTM whose weights are not one chunk of memory
            model.lstm(torch.randn(2, 8))
        if state == "managed":
            before = Portrait(model)
            managed.release()
            assert before.rest == Portrait(model).rest
            now, unmanaged = mapped(), managed.report().unmanaged_tensors
            assert not any(in_pool(tensor, now) for name, tensor in tensors(model).items() if name not in unmanaged)


def test_tied_embeddings_move_once_and_stay_tied(device: Device) -> None:
    model = models.build("llama", tie_word_embeddings=True, hidden_size=512, vocab_size=1000)
    embeddings: torch.Tensor = model.model.embed_tokens.weight
    size = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors(model).values()}.values())
    managed = ballonet.manage(model)
    assert model.lm_head.weight is embeddings
    assert managed.report().pages * PAGE < size + embeddings.nbytes
    managed.release()
    assert model.lm_head.weight is model.model.embed_tokens.weight is embeddings


def test_tensors_inside_a_wrapper_are_moved(device: Device) -> None:
    model: Any = nn.Module()
    model.weight = nn.Parameter(TwoTensor(torch.randn(300), torch.randn(300)))
    inside = {"a": model.weight.a, "b": model.weight.b}
    before = {name: bits(tensor) for name, tensor in inside.items()}
    with ballonet.manage(model) as managed:
        assert not managed.report().unmanaged_tensors
        assert managed.report().pages == 1
        for name, tensor in inside.items():
            assert getattr(model.weight, name) is tensor
            assert in_pool(tensor)
            assert bits(tensor) == before[name]
    for name, tensor in inside.items():
        assert not in_pool(tensor)
        assert bits(tensor) == before[name]


def test_memory_shared_with_other_processes_stays_shared(device: Device) -> None:
    model = nn.Linear(4, 4)
    model.weight.data.share_memory_()
    with ballonet.manage(model) as managed:
        assert list(managed.report().unmanaged_tensors) == ["weight"]
        assert model.weight.is_shared()
        assert in_pool(model.bias)


ANY: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Module,
    "no parameters": lambda: nn.Sequential(nn.ReLU(), nn.Identity()),
    "one layer": lambda: nn.Linear(64, 3),
    "a module used twice": lambda: nn.Sequential(*[nn.Linear(64, 64)] * 2),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(64, 8, 1), nn.BatchNorm1d(8), nn.Flatten()),
    "a list": lambda: nn.ModuleList([nn.Linear(4, 4)]),
    "a script": lambda: torch.jit.script(nn.Linear(64, 3)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("make", ANY.values(), ids=ANY.keys())
def test_any_module_is_accepted(device: Device, make: Callable[[], nn.Module]) -> None:
    model = make()
    before = Portrait(model)
    with ballonet.manage(model) as managed:
        assert all_in_pool(model)
        assert not managed.report().unmanaged_tensors
        if isinstance(model, nn.Sequential):
            model(torch.randn(2, 64, *[5] * isinstance(model[0], nn.Conv1d)))
    assert before.rest.keys() == tensors(model).keys()
    assert none_in_pool(model)
    assert Portrait(model).hooks == before.hooks


@pytest.mark.parametrize("born", [False, True])
@pytest.mark.parametrize("managed_in", [False, True])
def test_inference_mode_at_birth_or_when_managed(device: Device, born: bool, managed_in: bool) -> None:
    with torch.inference_mode(born):
        model = nn.Linear(8, 8)
    expected = bits(model.weight)
    with torch.inference_mode(managed_in):
        managed = ballonet.manage(model)
    for _ in range(2):
        assert model.weight.is_inference() == born
        assert bits(model.weight) == expected
        with torch.inference_mode():
            model(torch.ones(1, 8))
        if not born:
            model(torch.ones(1, 8)).sum().backward()
        managed.release()
    assert not in_pool(model.weight)


class Stubborn(nn.Parameter):
    """Does not let its memory be exchanged."""

    @property
    def data(self) -> torch.Tensor:
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError("stubborn")


def test_a_tensor_that_cannot_be_moved_keeps_those_beside_it_too(device: Device) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Module())
    shared = torch.randn(40)
    model[1].first = nn.Parameter(shared[:20])
    model[1].second = Stubborn(shared[20:])
    before = Portrait(model)
    addresses = model[1].first.data_ptr(), model[1].second.data_ptr()
    with pytest.raises(ManageError, match=r"Stubborn of shape \(20,\) does not let its memory.*stubborn"):
        ballonet.manage(model)
    assert before.is_of(model)
    assert (model[1].first.data_ptr(), model[1].second.data_ptr()) == addresses
    assert not in_pool(model[0].weight)
    assert ballonet.stats().pages.weights == 0


# What users do with a managed model


def test_saving_loading_copying_give_what_stock_gives(device: Device, tmp_path: Path) -> None:
    model = models.build("llama", **WIDE)
    model.save_pretrained(tmp_path / "stock")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock_file = io.BytesIO()
    torch.save(model.state_dict(), stock_file)
    with ballonet.manage(model):
        model.save_pretrained(tmp_path / "managed")
        for file in (tmp_path / "stock").iterdir():
            assert file.read_bytes() == (tmp_path / "managed" / file.name).read_bytes(), file.name
        state = model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        managed_file = io.BytesIO()
        torch.save(state, managed_file)
        assert abs(managed_file.tell() - stock_file.tell()) < 4096

        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin), logits(model))
        assert not {id(t) for t in tensors(twin).values()} & {id(t) for t in tensors(model).values()}

        changed = {name: tensor + 1 for name, tensor in expected.items()}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
        model.load_state_dict(changed)
        assert addresses == {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
        del state
    assert all(torch.equal(tensor, changed[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(twin.state_dict()["lm_head.weight"], expected["lm_head.weight"])


def test_a_copy_is_not_managed(device: Device, tmp_path: Path) -> None:
    model = models.build("llama")
    managed = ballonet.manage(model, chaos=3)
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert chaos_of(managed) is not None
    before = dict(chaos_of(managed).moved)
    for other in (twin, loaded):
        assert torch.equal(logits(other), logits_without_chaos(model, managed))
    assert dict(chaos_of(managed).moved) == before
    managed.release()
    with ballonet.manage(twin):
        assert torch.equal(logits(twin), logits(model))


def logits_without_chaos(model: Any, managed: ballonet.Managed) -> torch.Tensor:
    forwards = managed._forwards
    chaos, forwards.chaos = forwards.chaos, None
    try:
        return logits(model)
    finally:
        forwards.chaos = chaos


def test_training_goes_on(device: Device) -> None:
    def train(model: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(4):
            batch = models.prompts(2, 9)
            loss = model(**batch, labels=batch["input_ids"]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
            if step == 1 and managed is not None:
                managed.release()
        return losses

    managed = None
    expected = train(models.build("llama"))
    model = models.build("llama")
    managed = ballonet.manage(model)
    assert all(map(torch.equal, train(model), expected))


def test_a_graph_made_before_can_be_walked_back_after(device: Device) -> None:
    linear = nn.Linear(8, 8)
    twin = copy.deepcopy(linear)
    loss = linear(torch.ones(1, 8)).square().sum()
    with ballonet.manage(linear):
        loss.backward()
        twin(torch.ones(1, 8)).square().sum().backward()
        assert torch.equal(linear.weight.grad, twin.weight.grad)


def test_a_model_that_was_converted_meanwhile_is_released_all_the_same(device: Device) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    managed = ballonet.manage(model)
    model[0].double()
    model[1].weight = model[0].weight
    managed.release()
    assert none_in_pool(nn.ParameterList([model[1].bias]))
    assert ballonet.stats().pages.weights == 0
    assert model[1].weight is model[0].weight


def test_a_view_outlives_the_release(device: Device) -> None:
    model = nn.Linear(400, 400)
    managed = ballonet.manage(model)
    view = model.weight.detach()[3]
    expected = view.clone()
    managed.release()
    model.weight.data.zero_()
    assert in_pool(view)
    assert torch.equal(view, expected)
    held = ballonet.stats().pages.weights
    assert 0 < held <= -(-model.weight.nbytes // PAGE) + 1
    del view
    assert ballonet.stats().pages.weights == 0


# Managing and releasing


def test_release_is_exact_and_can_be_repeated(device: Device) -> None:
    model = models.build("llama")
    kept = model.register_forward_pre_hook(lambda *_: None)
    before = Portrait(model)
    with ballonet.manage(model) as managed:
        assert managed.model is model
        assert not managed.report().released
        assert "3 decoder layers" in repr(managed)
        assert str(managed.report().pages) in repr(managed)
    assert managed.report().released
    assert managed.report().pages == 0
    assert "released" in repr(managed)
    assert before.is_of(model)
    managed.release()
    assert before.is_of(model)
    again = ballonet.manage(model)
    managed.release()  # the first one has nothing to do with the second
    assert all_in_pool(model)
    again.release()
    kept.remove()


def test_a_managed_model_has_few_members(device: Device) -> None:
    with ballonet.manage(nn.Linear(4, 4)) as managed:
        public = {name for name in dir(managed) if not name.startswith("_")}
    assert public == {"report", "release", "resident", "editable", "prefixes", "model"}
    assert managed.report().pages == 0


def test_a_model_is_managed_once(device: Device) -> None:
    model = models.build("llama")
    with ballonet.manage(model, chaos=3) as managed:
        before = Portrait(model)
        assert ballonet.manage(model) is ballonet.manage(model, chaos=3) is managed
        with pytest.raises(AlreadyManaged, match="release"):
            ballonet.manage(model, chaos=4)
        for part in (model.model, nn.Sequential(model), nn.ModuleList([model.model.layers[1]])):
            with pytest.raises(AlreadyManaged, match="release"):
                ballonet.manage(part)
        assert before.is_of(model)
    with ballonet.manage(model.model):
        assert all_in_pool(model.model)


def test_collecting_a_model_returns_its_pages(device: Device) -> None:
    model: Any = models.build("llama", **WIDE)
    managed = ballonet.manage(model)
    alive = weakref.ref(model)
    model.generate(**models.prompts(1, 5), max_new_tokens=3)
    head = model.lm_head.weight
    expected = head.detach().clone()
    model = None
    gc.collect()
    assert alive() is None
    assert managed.report().released
    assert managed.model is None
    assert "collected" in repr(managed)
    assert torch.equal(head, expected)
    assert 0 < ballonet.stats().pages.weights <= -(-head.nbytes // PAGE) + 1
    del head
    assert ballonet.stats().pages.weights == 0
    managed.release()


def test_the_handle_need_not_be_kept(device: Device) -> None:
    model = models.build("llama")
    ballonet.manage(model)
    gc.collect()
    assert all_in_pool(model)
    managed = ballonet.manage(model)
    assert managed.model is model
    managed.release()
    assert none_in_pool(model)


def test_manage_installs_where_that_was_not_done(
    install: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALLONET_BUDGET", str(BUDGET))
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    monkeypatch.setenv("BALLONET_CHAOS", "17")
    model = nn.Linear(4, 4)
    assert runtime.current() is None
    managed = ballonet.manage(model)
    assert runtime.require().budget == BUDGET
    assert chaos_of(managed) is not None
    assert chaos_of(managed).seed == 17
    assert in_pool(model.weight)
    managed.release()


def test_a_module_that_cannot_be_hooked_comes_back_whole(device: Device) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    model = models.build("llama")
    before = Portrait(model)
    last = model.model.layers[2]
    last.register_forward_hook = refuse
    with pytest.raises(RuntimeError, match="no more hooks"):
        ballonet.manage(model)
    assert before.is_of(model)
    assert none_in_pool(model)
    assert ballonet.stats().pages.weights == 0
    del last.register_forward_hook
    with ballonet.manage(model):
        assert all_in_pool(model)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"budget": "80GiB"}, r"no option 'budget'.*'prefix_dir_limit'"),
        ({"tpot_slo": "80ms"}, "no decoder layers"),
        ({"tpot_slo": 0}, "takes no time"),
        ({"ttft_slo": "soon"}, "is no time"),
        ({"tpot_slo": "80ms", "interval": 2}, "leaves no choice"),
        ({"priority": 1.5}, "whole number"),
        ({"floor": -1}, "floor is -1, which is no size"),
        ({"floor": "much"}, "floor is 'much', which is no size"),
        ({"floor": "2TiB"}, "floor is 2TiB, which the budget of"),
        ({"chaos": -1}, "seed"),
        ({"chaos": "five"}, "seed"),
        ({"chaos": True}, "seed"),
    ],
)
def test_options_that_it_does_not_have(device: Device, options: dict[str, Any], what: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises((ManageError, ConfigError), match=what):
        ballonet.manage(model, **options)
    assert in_pool(model.weight)
    assert ballonet.stats().pages.weights == 0


def test_what_is_no_module_or_has_no_weights_yet(device: Device) -> None:
    with pytest.raises(ManageError, match=r"torch\.nn\.Module, not str"):
        ballonet.manage("gpt2")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ManageError, match=r"weight is on the meta device.*load"):
        ballonet.manage(model)
    with pytest.raises(ManageError, match="run the model once"):
        ballonet.manage(nn.LazyLinear(4))
    assert ballonet.stats().pages.weights == 0


def test_a_model_on_another_device_is_told_where_to_go() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    found = survey(members(model, []), torch.device("cuda", 1))
    assert isinstance(found.refused, WrongDevice)
    assert re.match(r"0\.weight is on cpu.*model\.to\('cuda:1'\)", str(found.refused))
    assert not found.spans


# The budget


@pytest.mark.parametrize("loaded", ["before", "after"])
@pytest.mark.parametrize("size", ["narrow", "wide"])
def test_the_smallest_budget_it_names_is_enough_and_one_page_less_is_not(
    install: Callable[[], Device], loaded: str, size: str
) -> None:
    if loaded == "after":
        install()
    model: Any = models.build("llama", **({} if size == "narrow" else WIDE))
    inputs = models.prompts(1, 20)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    before = Portrait(model)
    device = install()
    device.trim()
    weights = sum(tensor.nbytes for tensor in tensors(model).values())
    first = max(4 * PAGE, bytes_that_exist())
    ballonet.set_budget(first)
    with pytest.raises(BudgetError) as caught:
        ballonet.manage(model, interval=None)
    smallest = caught.value.smallest
    assert caught.value.budget == first
    assert weights <= caught.value.required < smallest < 2 * weights + 40 * PAGE
    assert str(smallest) in str(caught.value)
    ballonet.set_budget(smallest - PAGE)
    with pytest.raises(BudgetError) as caught:
        ballonet.manage(model, interval=None)
    assert caught.value.smallest == smallest
    assert before.is_of(model)
    assert ballonet.stats().pages.weights == 0
    ballonet.set_budget(smallest)
    with ballonet.manage(model, interval=None):
        assert all_in_pool(model)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), expected)
        assert bytes_that_exist() <= smallest
