"""`manage()` and `release()`: where weights lie, that nothing else about a model changes, that no page is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.allocator.errors import AlreadyManaged, BudgetError, ConfigError, ManageError
from ballonet.hooks.weights import moving
from ballonet.hooks.weights.moving import Step
from ballonet.testing import chaos_of

from . import models
from .models import logits
from .pool import bytes_that_exist, in_pool, installing, mapped
from .portrait import Portrait, all_in_pool, bits, conserved, none_in_pool, tensors

pytestmark = pytest.mark.chaos


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


# Where the weights lie


@pytest.mark.parametrize(("architecture", "loaded"), [("llama", "after"), ("gpt2", "before"), ("bloom", "after")])
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
    assert (pages.weights, pages.pending_free) == (0, 0)


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_moving_takes_the_weights_and_one_layer(
    install: Callable[[], Device], loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back as well: at most one layer at once, and the pages of what has moved are free before the next one."""
    layers = 8
    if loaded == "after":
        install()
    model = models.build("llama", num_hidden_layers=layers, **WIDE)
    device = install()
    weights = sum(tensor.nbytes for tensor in tensors(model).values())
    layer = sum(tensor.nbytes for tensor in tensors(model.model.layers[0]).values())
    others = bytes_that_exist() - (weights if loaded == "after" else 0)
    device.reset_peaks()
    managed = ballonet.manage(model)
    slack = (layers + 4) * PAGE  # ends of ranges
    limit = others + weights + slack + (layer if loaded == "after" else 0)
    assert weights <= device.snapshot()["physical_peak"] <= limit
    assert abs(managed.report().pages * PAGE - weights) <= slack
    assert conserved(device, managed)
    device.reset_peaks()
    exist, out = bytes_that_exist(), moving.out
    moved: list[int] = []  # bytes of each step

    def noted(device: Device, step: Step, *more: Any) -> None:
        assert bytes_that_exist() <= exist - sum(moved) + slack
        moved.append(sum(span.nbytes for _, _, span in step))
        out(device, step, *more)

    monkeypatch.setattr(moving, "out", noted)
    managed.release()
    assert max(moved) <= layer
    assert weights <= sum(moved) <= weights + slack
    assert device.snapshot()["physical_peak"] <= others + weights + slack
    assert bytes_that_exist() <= others + slack


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


ANY: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Module,
    "a module used twice": lambda: nn.Sequential(*[nn.Linear(64, 64)] * 2),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(64, 8, 1), nn.BatchNorm1d(8), nn.Flatten()),
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
        members = {name for name in dir(managed) if not name.startswith("_")}
        assert members == {"report", "release", "resident", "editable", "prefixes", "model", "sleep", "wake", "asleep"}
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
    assert ballonet.manage(model) is again
    again.release()
    kept.remove()


def test_a_model_is_managed_once(device: Device) -> None:
    model = models.build("llama")
    with testing.manage(model, chaos=3) as managed:
        before = Portrait(model)
        assert ballonet.manage(model) is testing.manage(model, chaos=3) is managed
        with pytest.raises(AlreadyManaged, match="release"):
            testing.manage(model, chaos=4)
        for part in (model.model, nn.Sequential(model), nn.ModuleList([model.model.layers[1]])):
            with pytest.raises(AlreadyManaged, match="release"):
                ballonet.manage(part)
        assert before.is_of(model)
    with ballonet.manage(model.model):
        assert all_in_pool(model.model)


def test_manage_installs_where_that_was_not_done(
    install: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALLONET_BUDGET", str(BUDGET))
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    monkeypatch.setenv("BALLONET_CHAOS", "17")
    model = nn.Linear(4, 4)
    assert devices.current() is None
    managed = ballonet.manage(model)
    assert devices.require().budget == BUDGET
    assert chaos_of(managed) is not None
    assert chaos_of(managed).seed == 17
    assert in_pool(model.weight)
    managed.release()


def test_a_module_that_cannot_be_hooked_comes_back_whole(device: Device) -> None:
    model = models.build("llama")
    before = Portrait(model)
    last = model.model.layers[2]
    register, times = last.register_forward_pre_hook, count()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if next(times):  # the first is the gate's
            raise RuntimeError("no more hooks")
        return register(*args, **kwargs)

    last.register_forward_pre_hook = refuse
    with pytest.raises(RuntimeError, match="no more hooks"):
        ballonet.manage(model)
    assert before.is_of(model)
    assert none_in_pool(model)
    assert ballonet.stats().pages.weights == 0
    del last.register_forward_pre_hook
    with ballonet.manage(model):
        assert all_in_pool(model)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"budget": "80GiB"}, r"no option 'budget'.*'batches'"),
        ({"tpot_slo": "80ms"}, "no decoder layers"),
        ({"priority": 1.5}, "whole number"),
        ({"floor": "2TiB"}, "floor is 2TiB, which the budget of"),
        ({"chaos": 5}, "no option 'chaos'"),  # ballonet.testing has it
    ],
)
def test_options_that_it_does_not_have(device: Device, options: dict[str, Any], what: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises((ManageError, ConfigError), match=what):
        ballonet.manage(model, **options)
    assert in_pool(model.weight)
    assert ballonet.stats().pages.weights == 0


def test_non_module_and_model_without_weights_are_refused(device: Device) -> None:
    with pytest.raises(ManageError, match=r"torch\.nn\.Module or a pipeline of such, not str"):
        ballonet.manage("gpt2")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ManageError, match=r"weight is on the meta device.*load"):
        ballonet.manage(model)
    with pytest.raises(ManageError, match="run the model once"):
        ballonet.manage(nn.LazyLinear(4))
    assert ballonet.stats().pages.weights == 0


# The budget


@pytest.mark.parametrize(("loaded", "size"), [("before", "wide"), ("after", "narrow"), ("after", "wide")])
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
