"""`ballonet plan`: from configurations to what people and programs read, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import devices, install
from ballonet.allocator.config import Config, parse_size
from ballonet.allocator.errors import ConfigError
from ballonet.hooks.device.key import key_of
from ballonet.hooks.plan.forward import _weights as weights_of
from ballonet.hooks.plan.forward import seen, shape_of
from ballonet.hooks.plan.planner import Planner
from ballonet.hooks.plan.planner import _at_least as at_least
from ballonet.hooks.programs import model_info
from ballonet.hooks.weights.model_parts import decoder_layers, members, survey
from ballonet.offload.record import record
from ballonet.offload.record.record import Point, Record

from . import models
from .pool import cache_of_its_own, installing

H100 = "by the data sheet NVIDIA H100 Tensor Core GPU, of 2023"
USAGE = "usage: ballonet plan"
GPU = {"memory": "24GiB", "bandwidth": "1TB/s", "flops": {"2": 1e14, "4": 5e13}, "link": "25GB/s"}
KEYS = (
    "fits least_budget budget host_budget page_size context prompt batch slo slo_met exact pages host_pages interval "
    "layers_streamed ttft_seconds tpot_seconds limit binds hardware changes models"
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    cache_of_its_own(tmp_path / "cache", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The configuration of a model of 64 MiB, in 16 layers."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
        max_position_embeddings=32768,
        dtype=torch.float32,
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code of the command, and what it prints."""
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_json_is_one_object_with_all_that_is_asked(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [folder, "--context", "2k", "--batch", "8", "--budget", "64MiB", "--gpu", "h100", "--slo", "1ms"]
    code, out, _ = told(capsys, *asked, "--json")
    facts = json.loads(out)
    assert devices.current() is None, "no device is opened"
    assert code == 0
    assert out.count("\n") == 1
    assert facts.keys() == {*KEYS.split()}
    assert facts["pages"].keys() == {"weights", "kv", "activations"}
    assert (facts["context"], facts["prompt"], facts["batch"], facts["slo"]) == (2048, 2047, 8, 0.001)
    assert facts["page_size"] == 8 * 2**20  # of a GPU, wherever it is asked
    assert facts["hardware"] == {"name": "NVIDIA H100 SXM", "source": H100, "link": 55e9}
    assert facts["changes"]
    for fact in facts["changes"]:
        assert fact.keys() >= {"what", "to", "unit", "text", "fits", "ttft_seconds", "tpot_seconds", "limit"}
    assert facts == ballonet.plan(folder, context=2048, batch=8, budget="64MiB", gpu="H100", slo="1ms")


def test_the_same_budget_that_a_change_names_lifts_the_limit(folder: str) -> None:
    asked: dict[str, Any] = {"context": 1024, "batch": 4, "gpu": "h100", "page_size": "2MiB"}
    facts = ballonet.plan(folder, budget="16MiB", **asked)
    assert not facts["fits"]
    assert facts["limit"] == "memory"
    (budget,) = (fact for fact in facts["changes"] if fact["what"] == "budget")
    assert budget["to"] == facts["least_budget"]
    assert ballonet.plan(folder, budget=budget["to"], **asked)["fits"]
    assert ballonet.plan(folder, budget=budget["text"].split()[-1], **asked)["fits"]
    assert not ballonet.plan(folder, budget=budget["to"] - 2**21, **asked)["fits"]


@pytest.mark.parametrize("nbytes", [1, 4096, 10**6 + 1, 2**30 - 1, 2**30 + 1, 123456789012, 3 * 2**40 + 12345])
def test_a_size_that_is_told_is_never_too_small(nbytes: int) -> None:
    assert nbytes <= parse_size(at_least(nbytes)) <= nbytes * 1.01 + 1


def test_people_read_whether_it_fits_how_fast_what_binds_and_what_helps(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [folder, "--context", "2k", "--page-size", "2MiB", "--gpu", "h100"]
    code, out, error = told(capsys, *plan, "--budget", "1GiB")
    assert (code, error) == (0, "")
    assert "It fits." in out
    assert "all 16 layers resident" in out
    assert "by the data sheet NVIDIA H100 Tensor Core GPU" in " ".join(out.split())
    assert "link 55 GB/s" in " ".join(out.split())
    code, out, _ = told(capsys, *plan, "--budget", "60MiB", "--batch", "2", "--slo", "1us")
    assert code == 0
    assert "what would help" in out
    assert "a budget of" in out
    code, out, _ = told(capsys, *plan, "--budget", "4MiB")
    assert code == 0
    assert "It does not fit." in out
    assert "memory: it does not fit" in out


def test_a_plan_that_fits_by_its_last_token_says_what_binds_before(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pages of the last token are fewer than the budget: activations of the prompt are what does not fit."""
    plan = [folder, "--context", "16k", "--page-size", "2MiB", "--gpu", "h100", "--budget", "350MiB"]
    facts = json.loads(told(capsys, *plan, "--json")[1])
    assert (facts["fits"], facts["limit"]) == (False, "memory")
    assert sum(facts["pages"].values()) * facts["page_size"] < facts["budget"]
    binds = facts["binds"]
    assert (binds["what"], binds["when"]) == ("activations", "prompt")
    assert sum(binds["pages"].values()) * facts["page_size"] >= facts["least_budget"] > facts["budget"]
    assert "least budget set by the prompt: activations " in " ".join(told(capsys, *plan)[1].split())
    small = ballonet.plan(folder, context=64, gpu="h100", page_size="2MiB", budget="1GiB")
    assert (small["fits"], small["binds"]["when"], small["binds"]["what"]) == (True, "loading", "weights")


def test_several_models_share_the_device(folder: str) -> None:
    asked: dict[str, Any] = {"context": 512, "gpu": "h100", "page_size": "2MiB"}
    one, two = ballonet.plan(folder, budget="2GiB", **asked), ballonet.plan([folder] * 2, budget="2GiB", **asked)
    assert {name: 2 * pages for name, pages in one["pages"].items()} == two["pages"]
    assert len(two["models"]) == 2
    tight = ballonet.plan([folder] * 2, budget=one["least_budget"] + 2**23, **asked)
    assert tight["least_budget"] > one["least_budget"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "bloom", "zamba2", "qwen3_next"])
def test_sizes_are_those_of_the_model_itself(name: str, tmp_path: Path) -> None:
    if name not in models.architectures.ARCHITECTURES:
        pytest.skip("no such tiny model")
    model = models.build(name)
    model.config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.nbytes
        for parameter in (*model.parameters(), *model.buffers())
    }
    assert sum(weight.nbytes for weight in shape.weights) == sum(storages.values())
    layers = decoder_layers(model)
    spans = survey(members(model, layers), torch.device("cpu")).spans
    assert [(weight.nbytes, weight.layer) for weight in shape.weights] == [(span.nbytes, span.layer) for span in spans]
    halves = [block.nbytes for block in shape.blocks(16)]
    assert sum(halves) < sum(storages.values())
    facts = model_info.gather(str(tmp_path), Config(device="cpu", page_size=4096), 2, 40)
    assert [index for row in facts["layers"] if row["elastic"] for index in row["indices"]] == sorted(shape.widths)


def test_weight_shared_by_layers_belongs_to_none() -> None:
    model = models.build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    layers = decoder_layers(model)
    spans = survey(members(model, layers), torch.device("cpu")).spans
    assert [(weight.nbytes, weight.layer) for weight in weights_of(model, layers)] == [
        (span.nbytes, span.layer) for span in spans
    ]


def test_a_forward_without_values_has_the_operations_of_its_matrices(folder: str) -> None:
    shape = shape_of(folder)
    (first, last) = seen(shape, 2, 64, 64)
    matrices = sum(
        weight.numel() for name, weight in shape.model.named_parameters() if weight.dim() > 1 and "embed" not in name
    )
    head = shape.model.lm_head.weight.numel()
    pairs = 2 * 4 * 64 * 64 * (64 + 64)  # sequences, heads, tokens, tokens, elements of a key and a value
    assert first.work.flops == 2 * 2 * (64 * (matrices - head) + head) + 16 * pairs
    assert last.work.flops == pytest.approx(2 * 2 * matrices + 16 * 2 * pairs / 64)
    assert last.work.read > 4 * matrices
    logits = 2 * 199 * 4
    assert first.peak >= 2 * 64 * 256 * 4 + logits
    longer, _ = seen(shape, 2, 128, 128)
    assert longer.peak == pytest.approx(2 * first.peak, rel=0.05)


def test_record_of_this_machine_counts(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key of a model that was loaded is that of its configuration."""
    unknown = ballonet.plan(folder, context=128, budget="2GiB")
    assert (unknown["tpot_seconds"], unknown["limit"], unknown["fits"]) == (None, None, True)
    assert "ballonet profile" in unknown["hardware"]["source"]
    with install.stock():
        model = models.transformers.AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
        model.save_pretrained(folder)
    with installing(2**28, 2**18) as start:
        device = start()
        loaded = ballonet.from_pretrained(folder, dtype="auto")
        key = key_of(loaded, device)
        ballonet.manage(loaded).release()
        del loaded
    times = {Point("prefill", 1, 128): 0.5, Point("decode", 1, 128): 0.02, Point("decode", 1, 64): 0.01}
    path = record.path_of(tmp_path / "cache", key)
    record.save(Record(key, 2e9, times), path)
    known = ballonet.plan(folder, context=129, prompt=128, budget="2GiB")
    assert known["hardware"] == {"name": "this CPU", "source": "measured on this machine", "link": 2e9}
    assert (known["ttft_seconds"], known["tpot_seconds"]) == pytest.approx((0.5, 0.02))
    assert known["limit"] == "compute"
    between = ballonet.plan(folder, context=97, prompt=96, budget="2GiB")
    assert 0.01 < between["tpot_seconds"] < 0.02
    record.save(Record(key, 2e9, times, beside={"prefill": 0.25, "decode": 0.125}), path)
    beside = ballonet.plan(folder, context=129, prompt=128, budget="2GiB")
    assert (beside["ttft_seconds"], beside["tpot_seconds"]) == pytest.approx((0.75, 0.145))
    record.save(Record({**key, "torch": "0.1"}, 2e9, times), path)
    elsewhere = ballonet.plan(folder, context=129, prompt=128, budget="2GiB")
    assert "was measured for another torch" in elsewhere["hardware"]["source"]
    assert elsewhere["tpot_seconds"] is None
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be read: .* Delete the file, or measure anew with ballonet"):
        ballonet.plan(folder, context=129)
    other = ballonet.plan(folder, context=129, prompt=128, budget="2GiB", gpu="h100")
    assert other["hardware"]["source"] == H100


def test_pages_leaving_the_device_have_to_fit_the_host(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"context": 512, "page_size": "2MiB", "gpu": "h100"}
    asked["budget"] = ballonet.plan(folder, budget="1GiB", **asked)["least_budget"]
    unknown = ballonet.plan(folder, **asked)
    assert (unknown["fits"], unknown["host_budget"]) == (True, None)
    assert sum(unknown["host_pages"].values()) > 0
    short = ballonet.plan(folder, host_budget="2MiB", **asked)
    assert (short["fits"], short["limit"]) == (False, "host")
    (change,) = (other for other in short["changes"] if other["what"] == "host")
    assert (change["fits"], change["unit"]) == (True, "bytes")
    assert change["to"] >= sum(unknown["host_pages"].values()) * 2**21  # by the most that operators may have
    assert ballonet.plan(folder, host_budget=change["to"], **asked)["fits"]
    assert not ballonet.plan(folder, host_budget=change["to"] - 2**21, **asked)["fits"]
    command = [folder, "--context", "512", "--budget", str(asked["budget"]), "--page-size", "2MiB", "--gpu", "h100"]
    code, out, _ = told(capsys, *command, "--host-budget", "2MiB")
    assert code == 0
    assert "host memory: what leaves the device has no room there, which has 2MiB" in " ".join(out.split())
    here = ballonet.plan(folder, context=512, budget="64MiB")
    assert here["host_budget"] > 0


def test_a_file_describes_a_device(folder: str, tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"name": "mine", **GPU}))
    facts = ballonet.plan(folder, context=128, gpu=tmp_path / "gpu.json")
    assert facts["hardware"] == {"name": "mine", "source": f"by the file {tmp_path / 'gpu.json'}", "link": 25e9}
    assert 20 * 2**30 < facts["budget"] < 24 * 2**30
    (tmp_path / "gpu.json").write_text(json.dumps({**GPU, "flops": 1}))
    slow = ballonet.plan(folder, context=128, gpu=tmp_path / "gpu.json")
    assert slow["ttft_seconds"] > 1e6 * facts["ttft_seconds"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "cannot be read as JSON"),
        ("[1]", "holds no object"),
        *((json.dumps({key: GPU[key] for key in GPU if key != name}), rf"gpu.json lacks {name} \(") for name in GPU),
        (json.dumps({**GPU, "memory": "much"}), "memory in .* is 'much'"),
        (json.dumps({**GPU, "link": -1}), "link in .* is -1"),
        (json.dumps({**GPU, "flops": {"2": 0}}), "flops in"),
        (json.dumps({**GPU, "flops": "many"}), "flops in"),
    ],
)
def test_a_file_that_lacks_something_or_says_nonsense_is_refused(
    folder: str, tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "gpu.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        ballonet.plan(folder, context=128, gpu=tmp_path / "gpu.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *((line, USAGE) for line in ("", "llama", "llama --context 0", "llama --context -1", "llama --context 32x")),
        *((line, USAGE) for line in ("llama --context 1k --batch 0", "llama --context 1k --slo 0")),
        ("{folder}/nowhere/at/all --context 128", "is no model whose configuration can be read"),
        ("{folder} --context 64k", "beyond the 32768 positions"),
        ("{folder} --context 128 --prompt 256", "longer than the context"),
        ("{folder} --context 128 --gpu abacus", "neither a device of the table"),
        ("{folder} --context 128 --budget much", "is no size"),
        ("{folder} --context 128 --page-size 5000", "multiple of"),
        ("{folder} --context 128 --curve x.txt", "suffixes of a picture"),
        ("{folder} --context 128 --curve {folder}/x.svg", "no curve to draw"),
        ("vit --context 128", "no class that generates text"),
        ("t5 --context 128", "has an encoder"),
    ],
)
def test_bad_input_is_exit_code_2_and_says_what_to_do(
    folder: str, arguments: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, error = told(capsys, *arguments.format(folder=folder).split())
    assert (code, out) == (2, "")
    assert says in error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "llama", "num_hidden_layers": 0}, "how many"),
        ({"model_type": "llama", "hidden_size": None}, "cannot be|prepares no cache|can be read"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized"),
    ],
)
def test_a_configuration_that_lacks_sizes_is_refused(tmp_path: Path, content: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        ballonet.plan(tmp_path, context=16, gpu="h100")


@pytest.mark.parametrize("wrong", [{"context": 0}, {"context": 8, "batch": True}, {"context": 8, "slo": 0}])
def test_arguments_from_python_are_checked(folder: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"context is|batch is|slo is"):
        ballonet.plan(folder, **wrong)
    with pytest.raises(ConfigError, match="no model was given"):
        ballonet.plan([], context=8)


def test_a_curve_falls_from_the_least_budget_on(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = Planner(folder, 64, 1, budget="64MiB", page_size="2MiB", gpu="h100")
    points = planner.curve(6)
    assert len(points) == 6
    assert points[0][0] == planner.facts()["least_budget"]
    times = [seconds for _, seconds in points if seconds is not None]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.2 * times[-1]
    picture = tmp_path / "curve.svg"
    plan = [folder, "--context", "1k", "--budget", "64MiB", "--page-size", "2MiB", "--gpu", "h100", "--slo", "1ms"]
    assert told(capsys, *plan, "--curve", str(picture))[0] == 0
    assert "<svg" in picture.read_text()
