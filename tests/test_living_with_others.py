"""Models whose layers stream, in the hands of other libraries: what stock gives, or a refusal that says what to do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import AlreadyManaged, ManageError
from ballonet.offload.policy import plan

from . import models
from .pool import installing
from .portrait import all_in_pool, conserved, contents, none_in_pool
from .streaming.conftest import streams
from .test_manage_refusals import OFFLOADED
from .test_managed_lives import OPERATIONS, swapping
from .tuned import Tuned

pytestmark = pytest.mark.chaos


BUDGET = 2**23
PAGE = 4096
INPUTS = models.prompts(batch=2, longest=7)
IDS = INPUTS["input_ids"]


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with installing(BUDGET, PAGE) as now:
        now()
        yield


@pytest.fixture(autouse=True)
def tiny(tuned: Tuned) -> Iterator[None]:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    yield
    gc.collect()
    devices.require().check()
    assert ballonet.stats().pages.weights == 0


def build(**changes: Any) -> Any:
    with install.stock():
        return models.build("llama", num_hidden_layers=4, **changes)


@torch.no_grad()
def say(model: Any) -> torch.Tensor:
    """The logits."""
    logits: torch.Tensor = model(**INPUTS, use_cache=False).logits
    return logits


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def fly(model: Any, managed: ballonet.Managed) -> None:
    assert streams(managed, lambda: say(model)), managed


def stream(model: Any) -> ballonet.Managed:
    managed = ballonet.manage(model, interval=1)
    assert managed.report().streamed == (0, 1, 2, 3), "in two slots"
    fly(model, managed)
    return managed


Act = Callable[[Any], Any]


def alike(model: Any, twin: Any, managed: ballonet.Managed | None, name: str = "") -> None:
    """The same tokens, twice, and the same weights."""
    with install.stock():
        expected = say(twin)
    for _ in range(2):
        assert agree(say(model), expected), name
    assert contents(model) == contents(twin), name


# What is done to a model


def tied_across_layers(model: Any) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def tied_to_one_that_streams(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def step(model: Any) -> list[torch.Tensor]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return gradients


def checkpointed(reentrant: bool) -> Act:
    def act(model: Any) -> list[torch.Tensor]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        gradients = step(model)
        model.gradient_checkpointing_disable()
        if reentrant:
            model.disable_input_require_grads()
        return gradients

    return act


def wrapped_for_checkpoints(model: Any) -> list[torch.Tensor]:
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = checkpoint_wrapper(layer)
    return step(model)


def prepared(model: Any) -> list[torch.Tensor]:
    accelerator = accelerate.Accelerator(cpu=True)
    ready, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ready.train()
    accelerator.backward(ready(IDS, labels=IDS).loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.unwrap_model(ready).eval()
    accelerator.free_memory()
    return []


def averaged(model: Any) -> list[torch.Tensor]:
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    step(model)
    average.update_parameters(model)
    return [parameter.detach().clone() for parameter in average.parameters()]


CHANGES = ("load_state_dict", "load_state_dict, assigning", "resize up", "tie_weights", "requires_grad_")
ACTS: dict[str, Act] = {
    "half and back": lambda m: m.bfloat16().float(),
    "apply": lambda m: m.apply(lambda it: it.weight.data.mul_(0.5) if isinstance(it, nn.Linear) else None),
    "swapping": swapping(lambda m: m.bfloat16().float()),
    **{name: OPERATIONS[name] for name in CHANGES},
    "tied across layers": tied_across_layers,
    "tied to one that streams": tied_to_one_that_streams,
    "train": step,
    "checkpointing": checkpointed(False),
    "reentrant checkpointing": checkpointed(True),
    "CheckpointWrapper": wrapped_for_checkpoints,
    "accelerator": prepared,
    "average": averaged,
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ACTS)
def test_operation_on_a_model_that_streams_does_what_it_does_to_stock(name: str) -> None:
    model, twin = build(attention_dropout=0.0), build(attention_dropout=0.0)
    managed = stream(model)
    outcome = ACTS[name](model)
    with install.stock():
        expected = ACTS[name](twin)
    if isinstance(outcome, list):
        assert all(torch.equal(*pair) for pair in zip(outcome, expected, strict=True))
    del outcome
    alike(model, twin, managed, name)
    if name == "share_memory":
        assert "shared with other processes" in managed.report().unmanaged_tensors["lm_head.weight"]
    else:
        fly(model, managed)
    managed.release()
    alike(model, twin, None, name)


# Copies


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Act] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_those_of_stock(name: str) -> None:
    model, twin = build(), build()
    managed = stream(model)
    with install.stock():
        other = COPIES[name](model)
    assert managed.report().streamed
    fly(model, managed)
    assert none_in_pool(other)
    assert not {parameter.data_ptr() for parameter in other.parameters()} & {
        parameter.data_ptr() for parameter in model.parameters()
    }
    alike(other, twin, None)
    managed.release()


# Libraries


def test_accelerate_with_a_model_on_one_device() -> None:
    model, twin = build(), build()
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    managed = stream(model)
    with install.stock():
        expected = say(twin)
    assert agree(say(model), expected)
    managed.release()


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_accelerate_that_offloads(how: str, tmp_path: Path) -> None:
    model, twin = build(), build()

    def offload() -> None:
        with install.stock():
            if how == "cpu":
                accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            else:
                accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))

    with install.stock():
        expected = say(twin)
    offload()
    with pytest.raises(ManageError, match=OFFLOADED):
        ballonet.manage(model, interval=1)
    assert agree(say(model), expected)
    remove_hook_from_submodules(model)
    managed = stream(model)
    offload()
    for _ in range(2):
        assert agree(say(model), expected)
    if how == "disk":  # on the CPU what is offloaded to it keeps its memory
        assert "offloaded by accelerate" in managed.report().unmanaged_tensors["lm_head.weight"]
    remove_hook_from_submodules(model)
    alike(model, twin, managed)
    assert not managed.report().unmanaged_tensors
    managed.release()
    alike(model, twin, None)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    with install.stock():  # it makes tensors when it is imported
        from transformers import Trainer, TrainingArguments, set_seed

    def train(model: Any) -> float:
        set_seed(3)
        data = [{"input_ids": row, "labels": row} for row in IDS]
        options = {"max_steps": 2, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=data)
        loss: float = trainer.train().training_loss
        model.eval()
        return loss

    model, twin = build(), build()
    managed = stream(model)
    assert train(model) == train(twin)
    gc.collect()
    alike(model, twin, managed)
    fly(model, managed)
    managed.release()


# Weights of other classes


class Int8Params(nn.Parameter):
    """As that of bitsandbytes, with its memory and its scales once more in `CB` and `SCB`."""

    CB: torch.Tensor | None
    SCB: torch.Tensor | None


class Linear8bit(nn.Module):
    """Computes with what it took out of its weight at first, and puts it back each time."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        data = (linear.weight.detach() / scale).round().to(torch.int8)
        weight: Any = torch.Tensor._make_subclass(Int8Params, data, False)
        weight.CB = weight.SCB = None
        self.weight, self.state = weight, [data, scale]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ (self.state[0].float() * self.state[1]).t()
        self.weight.data = self.state[0]
        return outputs


def exchanged(model: Any, kind: Callable[[nn.Linear], nn.Module]) -> Any:
    with install.stock():
        for layer in model.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(layer.mlp, name, kind(getattr(layer.mlp, name)))
    return model


def test_weights_of_eight_bits_stay_where_their_layers_put_them() -> None:
    model, twin = (exchanged(build(), Linear8bit) for _ in range(2))
    managed = ballonet.manage(model, interval=1)
    alike(model, twin, managed)
    assert "puts its memory back" in managed.report().unmanaged_tensors["model.layers.1.mlp.up_proj.weight"]
    assert "model.layers.1.self_attn.q_proj.weight" not in managed.report().unmanaged_tensors
    fly(model, managed)
    managed.release()


def torchao(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    for layer in model.model.layers:
        quantization.quantize_(layer.mlp, quantization.Int8WeightOnlyConfig())


def bitsandbytes(kind: str) -> Act:
    def act(model: Any) -> None:
        nn_ = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes").nn

        def one(linear: nn.Linear) -> nn.Module:
            if kind == "8":
                it = nn_.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
                it.weight = nn_.Int8Params(linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
            else:
                it = nn_.Linear4bit(linear.in_features, linear.out_features, False, torch.float32, quant_type="nf4")
                it.weight = nn_.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4", module=it)
            moved: nn.Module = it.to("cpu")
            return moved

        exchanged(model, one)

    return act


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [torchao, bitsandbytes("4"), bitsandbytes("8")], ids=["torchao", "4 bits", "8 bits"])
def test_quantized_by_its_library(how: Act) -> None:
    with install.stock():
        model = build(hidden_size=64, intermediate_size=256)
        how(model)
        say(model)  # some take their weights apart at first
        expected = say(model)
    managed = stream(model)
    for _ in range(3):
        assert agree(say(model), expected)
    other = copy.deepcopy(model)
    assert agree(say(other), expected)
    del other
    gc.collect()
    fly(model, managed)
    assert all("mlp" in name for name in managed.report().unmanaged_tensors)
    managed.release()
    assert agree(say(model), expected)


# Parallel wrappers


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel(group: None) -> None:
    with install.stock():
        twin = build()
        expected = step(DistributedDataParallel(twin))
        model, other = build(), build()
        inside = DistributedDataParallel(other)
    managed = stream(model)
    with install.stock():
        outside = DistributedDataParallel(model)
    assert all(torch.equal(*pair) for pair in zip(step(outside), expected, strict=True))
    alike(model, twin, managed)
    fly(model, managed)  # whoever holds the weights
    with pytest.raises(AlreadyManaged):
        ballonet.manage(outside, interval=1)
    del outside
    alike(model, twin, managed)
    fly(model, managed)
    managed.release()

    with ballonet.manage(inside, interval=1):
        assert all(torch.equal(*pair) for pair in zip(step(inside), expected, strict=True))
        alike(other, twin, None)


@pytest.mark.filterwarnings("ignore")
def test_shards_are_refused(group: None) -> None:
    with install.stock():
        sharded = build()
        fully_shard(sharded)
        wrapped = FullyShardedDataParallel(build(), device_id=torch.device("cpu"))
    for model in (sharded, wrapped):
        with pytest.raises(ManageError, match="sharded by FSDP"):
            ballonet.manage(model, interval=1)
    later = build()
    with ballonet.manage(later, interval=1) as managed:
        with install.stock():
            fully_shard(later)
        assert later(IDS, labels=IDS).loss.item() == sharded(IDS, labels=IDS).loss.item()
        unmanaged = managed.report().unmanaged_tensors
        assert set(unmanaged.values()) == {unmanaged["lm_head.weight"]}
        assert "sharded by FSDP" in unmanaged["lm_head.weight"]


# Adapters


@pytest.fixture
def peft() -> Any:
    with install.stock():  # it makes tensors when it is imported
        return pytest.importorskip("peft", "0.20", reason="peft is not installed: pip install 'peft>=0.20'")


def lora(peft: Any) -> Any:
    targets = ["q_proj", "up_proj"]
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


def adapted(peft: Any, *models: Any) -> list[Any]:
    """Each with an adapter, all alike."""
    adapted_models = []
    with install.stock():
        for model in models:
            torch.manual_seed(1)
            adapted_models.append(peft.get_peft_model(model, lora(peft)))
    return adapted_models


def test_adapters_are_merged_into_whatever_streams(peft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers and slots: the weights are those of stock, byte for byte, and so they stay."""
    for m, slots in ((1, 1), (3, 3), (4, 2)):
        monkeypatch.setattr(
            plan, "at_interval", lambda pages, _, m=m, slots=slots: plan.streaming(pages, plan.spread(pages, m), slots)
        )
        model, twin = build(), build()
        managed = ballonet.manage(model, interval=1)
        assert len(managed.report().streamed) == m
        both = adapted(peft, model, twin)
        for act in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
            fly(model, managed)
            for variant in both:
                with install.stock():
                    getattr(variant, act)()
            alike(model, twin, managed, f"{m} in {slots}, {act}")
        fly(model, managed)
        model.to(torch.float64).to(torch.float32)
        alike(model, twin, managed, f"{m} in {slots}, converted")
        both.clear()
        del variant
        gc.collect()
        fly(model, managed)
        managed.release()
        alike(model, twin, None, f"{m} in {slots}, released")


@pytest.mark.parametrize("when", ["before", "after"])
def test_peft_through_its_life(peft: Any, when: str, tmp_path: Path) -> None:
    model, twin = build(), build()
    managed = stream(model) if when == "before" else None
    one, other = both = adapted(peft, model, twin)
    if managed is None:
        managed = ballonet.manage(one, interval=1)
    steps: dict[str, Act] = {
        "attached": lambda it: None,
        "off for a while": lambda it: it.disable_adapter_layers(),
        "on again": lambda it: it.enable_adapter_layers(),
        "trained": step,
        "merged": lambda it: it.merge_adapter(),
        "unmerged": lambda it: it.unmerge_adapter(),
        "a second one": lambda it: (torch.manual_seed(2), it.add_adapter("two", lora(peft)), it.set_adapter("two")),
        "merged again": lambda it: it.merge_adapter(["two"]),
        "unmerged again": lambda it: it.unmerge_adapter(),
        "the second gone": lambda it: (it.set_adapter("default"), it.delete_adapter("two")),
    }
    for name, act in steps.items():
        fly(one, managed)
        for variant in (one, other):
            with install.stock():
                act(variant)
        alike(one, other, managed, name)
        assert not managed.report().unmanaged_tensors
        assert all_in_pool(one, "device", "host"), name
        assert conserved(devices.require(), managed), name
    fly(one, managed)
    one.save_pretrained(tmp_path / "ours")
    other.save_pretrained(tmp_path / "stock")
    name = "adapter_model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    fly(one, managed)
    with install.stock():
        bases = [one.merge_and_unload(), other.merge_and_unload()]
    del one, other, both, variant
    gc.collect()
    alike(*bases, managed, "unloaded")
    if when == "before":
        fly(bases[0], managed)
    managed.release()
    alike(*bases, None)
