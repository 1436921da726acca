"""`ballonet info MODEL`: the widths, bytes and limits it names are those of real caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaForCausalLM

import ballonet
from ballonet.allocator import install
from ballonet.allocator.config import Config
from ballonet.allocator.errors import ConfigError
from ballonet.hooks import compat
from ballonet.hooks.kv.cache import plan
from ballonet.hooks.programs import model_info

from . import models
from .architectures import ARCHITECTURES
from .pool import installing

SETTINGS = Config(device="cpu", page_size=4096)
# Architectures through which no token goes without values -> what their code says
NOT_WITHOUT_VALUES = {
    "blip-2": "pixel_values",
    "jetmoe": "no data",
    "led": "invalid",
    "nllb-moe": "expert_tensor",
    "switch_transformers": "use_cache",
    "moonshine": "attention_mask",
}


def saved(folder: Path, name: str, **changes: Any) -> str:
    models.build(name, **changes).config.save_pretrained(folder)
    return str(folder)


def widths(caches: list[Any]) -> list[Any]:
    """(heads, elements of a key, of a value) of each layer that has been used as one with keys and values."""
    layers = [layer for cache in caches for layer in cache.layers]
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    return [None if keys is None else (keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs]


@pytest.mark.parametrize("name", sorted({*NOT_WITHOUT_VALUES, *list(ARCHITECTURES)[::8], "deepseek_v2", "t5gemma"}))
def test_without_values_a_token_finds_the_widths_of_a_real_cache(name: str) -> None:
    model = models.build(name)
    if not plan(type(model), model.config).elastic:
        return
    if name in NOT_WITHOUT_VALUES:
        with pytest.raises(Exception, match=NOT_WITHOUT_VALUES[name]):
            compat.run_without_values(type(model), model.config)
        return
    made: list[Any] = []
    models.before_each_forward(model, lambda step, cache: made.append(cache))
    model.generate(**models.questions(name, 1), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    real = made[-1]
    halves = (
        [real.self_attention_cache, real.cross_attention_cache] if hasattr(real, "cross_attention_cache") else [real]
    )
    before = model.config.to_dict()
    assert widths(compat.run_without_values(type(model), model.config)) == widths(halves)
    assert model.config.to_dict() == before


@pytest.mark.parametrize(("name", "page"), [("llama", 65536), ("deepseek_v2", 4096), ("gemma2", 4096)])
def test_the_bytes_are_those_that_a_managed_model_takes(tmp_path: Path, name: str, page: int) -> None:
    tokens = 40
    facts = model_info.gather(saved(tmp_path, name), Config(device="cpu", page_size=page), 3, tokens)
    with install.stock():
        model = models.build(name)
    with installing(2**25, page) as start:
        device = start()
        taken: list[int] = []

        def look(step: int, cache: Any) -> None:
            if cache is not None and cache.get_seq_length() == tokens:
                taken.append(device.snapshot()["pages"]["kv"] * page)

        with ballonet.manage(model), models.before_each_forward(model, look):
            models.generate(model, "greedy", models.prompts(3, 12), tokens=tokens - 12 + 2)
        assert taken == [facts["bytes"]]


@pytest.mark.parametrize(("name", "layers"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_a_device_must_have_no_more_of_a_model_with_more_layers(tmp_path: Path, name: str, layers: str) -> None:
    few, many = (
        model_info.gather(saved(tmp_path / f"{count}", name, **{layers: count}), SETTINGS, 1, 10) for count in (3, 6)
    )
    model = models.build(name, **{layers: 6})
    tensors = {parameter.data_ptr(): parameter.nbytes for parameter in (*model.parameters(), *model.buffers())}
    assert many["weights"] == sum(tensors.values())
    assert many["smallest"] == few["smallest"] < few["weights"]


def test_layers_that_are_alike_have_one_row(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 5, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}
    facts = model_info.gather(saved(tmp_path, "gemma2", **changes), SETTINGS, 2, 1000)
    full, window = facts["layers"]
    assert (full["indices"], window["indices"]) == ([0, 2, 4], [1, 3])
    assert (full["elastic"], window["elastic"]) == (True, False)
    assert "window" in window["why"]
    assert (full["heads"], full["k_dim"], full["v_dim"]) == (2, 8, 8)
    assert full["token_bytes"] == 2 * 2 * (8 + 8) * 4
    assert full["layers_per_range"] == 1
    assert full["bytes"] == facts["bytes"] == 3 * -(-1000 * full["token_bytes"] // 4096) * 4096
    assert full["longest"] == (2**31 - 1) // (full["token_bytes"] // 4)
    assert facts["class"] == "Gemma2ForCausalLM"
    assert facts["reason"] == facts["widths"] == ""
    json.dumps(facts)


def test_beyond_what_attention_kernels_can_index_nothing_is_elastic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, "llama")
    (row,) = model_info.gather(path, SETTINGS, 64, 1)["layers"]
    most = row["longest"]
    assert "bytes" in model_info.gather(path, SETTINGS, 64, most)["layers"][0]
    facts = model_info.gather(path, SETTINGS, 64, most + 1)
    assert "bytes" not in facts["layers"][0]
    assert facts["bytes"] is None
    model_info.show(facts)
    assert "32 bits" in capsys.readouterr().out


def test_the_dtype_of_the_weights_is_that_of_the_cache(tmp_path: Path) -> None:
    config = models.build("llama").config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    facts = model_info.gather(str(tmp_path), SETTINGS, 1, 10)
    assert facts["dtype"] == "bfloat16"
    assert facts["layers"][0]["token_bytes"] == 2 * (8 + 8) * 2


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, 1, 4, 6, 7], "0-1, 4, 6-7"),
        ([1, 3, 5], "1, 3, 5"),
        ([1, 4, 7, 10], "1, 4 ... 10"),
    ],
)
def test_indices_are_written_shortly(indices: list[int], says: str) -> None:
    assert model_info._spans(indices) == says


@pytest.mark.parametrize("name", ["llama", "t5gemma", "mamba", "minimax", "blip-2"])
def test_info_shows_a_table_of_layers(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = model_info.gather(saved(tmp_path, name), SETTINGS, 1, 100)
    assert facts["widths"].startswith("known with the first token: ") == (name in NOT_WITHOUT_VALUES)
    assert json.loads(json.dumps(facts)) == facts
    model_info.show(facts)
    said = capsys.readouterr().out
    assert facts["class"] in said
    assert ("Nothing of its cache is elastic" in said) == (name == "minimax")
    assert ("No layer of it is elastic" in said) == (name == "mamba")
    assert ("cross" in said) == (name == "t5gemma")


def test_a_type_is_enough_and_a_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_info.gather("gpt2", SETTINGS, 1, 10)["layers"][0]["indices"] == list(range(12))
    GPT2Config(n_layer=2).save_pretrained(tmp_path / "gpt2")
    assert model_info.gather("gpt2", SETTINGS, 1, 10)["layers"][0]["indices"] == [0, 1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no model whose configuration can be read"),
        ("{}", "is no model whose configuration can be read"),
        ("not json", "is no model whose configuration can be read"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}', "code of its own"),
        ('{"model_type": "llama", "layer_types": ["unheard_of"], "num_hidden_layers": 1}', "unheard_of"),
    ],
)
def test_unreadable_configuration_is_told(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        model_info.gather(str(tmp_path), SETTINGS, 1, 10)


def test_a_model_that_writes_no_text_has_a_reason() -> None:
    facts = model_info.gather("vit", SETTINGS, 1, 10)
    assert facts["class"] is None
    assert "no class that generates text" in facts["reason"]


@pytest.mark.parametrize(
    ("name", "way", "why"),
    [
        ("llama", "fine", ""),
        ("deepseek_v2", "coarse", "fine: "),
        (
            "bloom",
            "eager",
            "runs between an update of the cache and its attention; coarse: mask 6 is called with 6 and 7",
        ),
        ("dbrx", "eager", "its result's shape is only known on the device"),
        ("t5gemma", "eager", "the encoder's keys"),
    ],
)
def test_how_a_model_decodes_on_a_gpu_is_told_with_its_reason(
    name: str, way: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = model_info.gather(saved(tmp_path, name), SETTINGS, 1, 10)
    assert facts["pieces"]["way"] == way
    assert why in facts["pieces"]["why"]
    assert bool(facts["pieces"]["why"]) is bool(why)
    model_info.show(facts)
    said = " ".join(capsys.readouterr().out.split())
    assert {"fine": "cut at the cache's update", "coarse": "cut around modules", "eager": "launched ("}[way] in said


def test_info_leaves_open_what_the_first_call_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no values")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    facts = model_info.gather(saved(tmp_path, "llama"), SETTINGS, 1, 10)
    assert facts["pieces"] == {"way": "", "why": "NotImplementedError: no values"}
