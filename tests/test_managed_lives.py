"""A managed model that is changed in every way people change models: byte for byte what an unmanaged twin becomes.

Operations run with torch's own memory under them (`install.stock`), so that what is new lies outside of the pool until
it is taken in, and the kernel can tell the difference.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import ballonet
from ballonet import testing
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.testing import chaos_of

from . import models
from .pool import in_pool, installing
from .portrait import all_in_pool, conserved, contents, none_in_pool, tensors
from .programs import run
from .tuned import Tuned

pytestmark = pytest.mark.chaos


PAGE = 4096
BUDGET = 2**24
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": 2**13})  # so that the matrices of tiny layers have ranges of their own
    with installing(BUDGET, PAGE) as now:
        yield now()


def build(**changes: Any) -> Any:
    with install.stock():
        return models.build("llama", **(SIZES | changes))


def tokens(model: Any) -> torch.Tensor:
    inputs = models.prompts(2, 7)
    inputs["input_ids"] %= 100  # so that a smaller vocabulary will do
    return models.generate(model, "greedy", inputs, tokens=6).tokens


def hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Wrapper(nn.Module):
    """A layer around a layer, as adapters and profilers make them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(states * self.scale, *args, **kwargs)


def assign(model: Any) -> None:
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def tie(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()


def untie(model: Any) -> None:
    tie(model)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def resize(model: Any, size: int) -> None:
    torch.manual_seed(9)
    model.resize_token_embeddings(size)


def swapping(act: Callable[[Any], object]) -> Callable[[Any], None]:
    """`act` with torch's future way of converting a module."""

    def acting(model: Any) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            act(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return acting


def overwriting(act: Callable[[Any], object]) -> Callable[[Any], None]:
    """`act` with new Parameters instead of new memory in the old ones."""

    def acting(model: Any) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            act(model)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    return acting


def data_assigned(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone() * 2


def transposed(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Twice())


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[0].mlp.down_proj, "weight", amount=0.4)


def fused(model: Any) -> None:
    """Two weights become one memory, which they share."""
    both = torch.cat([model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.gate_proj.weight]).detach()
    model.model.layers[0].mlp.up_proj.weight.data = both[:96]
    model.model.layers[0].mlp.gate_proj.weight.data = both[96:]


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.to(torch.float64),
    "half, overwriting": overwriting(lambda m: m.half()),
    "load_state_dict, swapping": swapping(assign),
    "load_state_dict": lambda m: m.load_state_dict({name: 2 * value for name, value in m.state_dict().items()}),
    "load_state_dict, assigning": assign,
    "tie_weights": tie,
    "untie": untie,
    "resize up": lambda m: resize(m, 230),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "data assigned": data_assigned,
    "data transposed": transposed,
    "data fused": fused,
    "parametrized": parametrized,
    "pruned": pruned,
    "head exchanged": lambda m: setattr(m, "lm_head", nn.Linear(64, 199, bias=False).requires_grad_(False)),
    "layer taken out": lambda m: m.model.layers.__delitem__(1),
    "layer wrapped": lambda m: m.model.layers.__setitem__(1, Wrapper(m.model.layers[1])),
    "layers turned round": lambda m: setattr(m.model, "layers", nn.ModuleList(reversed(m.model.layers))),
}

WILD = {"half", "resize up", "layer wrapped", "load_state_dict, assigning"}  # those that chaos goes with


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_leaves_what_it_leaves_of_a_twin(device: Device, name: str) -> None:
    model, twin = build(), build()
    managed = testing.manage(model, chaos=2 if name in WILD else None)
    for variant in (model, twin):
        with install.stock(), torch.random.fork_rng():
            torch.manual_seed(4)
            OPERATIONS[name](variant)
    stayed = {name: tensor.data_ptr() for name, tensor in tensors(model).items() if in_pool(tensor)}
    expected = contents(twin)
    assert contents(model) == expected
    assert conserved(device, managed)
    assert torch.equal(tokens(model), tokens(twin))
    assert all_in_pool(model, "device", *(["host"] if chaos_of(managed) else []))  # which reclaims sources
    assert not managed.report().unmanaged_tensors
    now = tensors(model)
    assert stayed.items() <= {name: tensor.data_ptr() for name, tensor in now.items()}.items()
    assert contents(model) == expected
    assert conserved(device, managed)
    managed.release()
    assert none_in_pool(model)
    assert contents(model) == expected
    assert conserved(device, managed)
    assert ballonet.stats().pages.weights == 0
    assert torch.equal(tokens(model), tokens(twin))
    assert hooks(model) == hooks(twin)


@pytest.mark.counts
def test_all_operations_one_after_the_other(device: Device) -> None:
    model, twin = build(), build()
    managed = ballonet.manage(model)
    for name in ("layer wrapped", "half", "resize up", "pruned", "load_state_dict, assigning", "double", "untie"):
        for variant in (model, twin):
            OPERATIONS[name](variant)
        assert torch.equal(tokens(model), tokens(twin)), name
        assert all_in_pool(model)
        assert conserved(device, managed), name
    managed.release()
    assert contents(model) == contents(twin)


# Saving and copying


@pytest.mark.parametrize(("tied", "shards"), [(False, "50KB"), (True, "5GB")])
def test_saved_files_are_those_of_stock(tmp_path: Path, shards: str, tied: bool) -> None:
    stock, model = build(tie_word_embeddings=tied), build(tie_word_embeddings=tied)
    with ballonet.manage(model):
        for variant in (stock, model):
            OPERATIONS["half"](variant)
        tokens(model)
        for name, variant in (("stock", stock), ("managed", model)):
            variant.save_pretrained(tmp_path / name, max_shard_size=shards)
        files = {file.name: file.read_bytes() for file in (tmp_path / "stock").iterdir()}
        assert files == {file.name: file.read_bytes() for file in (tmp_path / "managed").iterdir()}
        assert (len(files) > 4) == (shards == "50KB")
        loaded = type(model).from_pretrained(tmp_path / "managed", dtype="auto")
        assert contents(loaded)["state_dict"] == contents(stock)["state_dict"]


def test_a_pickled_model_works_where_there_is_no_ballonet(tmp_path: Path) -> None:
    stock, model = build(), build()
    torch.save(stock, tmp_path / "stock.pt")
    managed = testing.manage(model, chaos=1)
    tokens(model)
    torch.save(model, tmp_path / "managed.pt")
    (tmp_path / "managed.pkl").write_bytes(pickle.dumps(model))
    sizes = [(tmp_path / f"{name}.pt").stat().st_size for name in ("stock", "managed")]
    assert abs(sizes[1] - sizes[0]) < 4096
    inputs = models.prompts(2, 7)
    with torch.no_grad():
        torch.save((inputs, stock(**inputs).logits), tmp_path / "expected.pt")
    managed.release()
    code = """
        import pickle, sys, torch
        sys.modules["ballonet"] = None
        inputs, expected = torch.load("expected.pt")
        for model in (torch.load("managed.pt", weights_only=False), pickle.load(open("managed.pkl", "rb"))):
            with torch.no_grad():
                assert torch.allclose(model(**inputs).logits, expected, atol=1e-5)
    """
    run(code, folder=tmp_path)


def test_a_copy_is_plain_and_independent(device: Device) -> None:
    model, stock = build(), build()
    with testing.manage(model, chaos=6) as managed:
        with install.stock():
            twin = copy.deepcopy(model)
        assert none_in_pool(twin)
        assert contents(twin) == contents(stock)
        assert chaos_of(managed) is not None
        before = dict(chaos_of(managed).moved)
        assert torch.equal(tokens(twin), tokens(stock))
        assert dict(chaos_of(managed).moved) == before
        twin.half()
        with torch.no_grad():
            twin.lm_head.weight.zero_()
        assert contents(model) == contents(stock)
        assert managed._weights.group.leases == 0
    with ballonet.manage(twin):  # as a model of its own
        assert all_in_pool(twin)
        assert torch.equal(tokens(twin), tokens(twin))
