"""Which layers become elastic: the verdict on a configuration, and that it is what happens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ballonet.hooks import compat
from ballonet.hooks.kv import generation
from ballonet.hooks.kv.cache import CROSS_ATTENTION, CachePlan, elastic_layers, plan, reason_to_leave
from ballonet.hooks.kv.layer import ElasticLayer

from .models import build

FULL = ("full_attention", "DynamicLayer", "ElasticLayer")
WINDOW = ("sliding_attention", "DynamicSlidingWindowLayer", "DynamicSlidingWindowLayer")
STATE = ("linear_attention", "LinearAttentionLayer", "LinearAttentionLayer")
HYBRID = ("hybrid", "LinearAttentionAndFullAttentionLayer", "ElasticHybridLayer")
INDEXED = ("indexed_attention", "DynamicIndexedLayer", "DynamicIndexedLayer")
NOTHING = ("dummy", "DummyLayer", "DummyLayer")
CROSS = (CROSS_ATTENTION, "DynamicLayer", "ElasticLayer")


def planned(model: Any) -> CachePlan:
    return plan(type(model), model.config)


def layers_of_a_cache(model: Any) -> list[type]:
    """The classes that a forward of the model makes."""
    detach = generation.attach(model)
    lease = generation.ModelLease(weakref.ref(model)).open()
    made = [type(layer) for layer in DynamicCache(config=model.config).layers]
    lease.close()
    detach()
    return made


@pytest.mark.parametrize(
    ("name", "layers", "cross"),
    [
        ("llama", [FULL] * 3, []),
        ("deepseek_v3", [FULL] * 2, []),
        ("gemma2", [FULL, WINDOW], []),
        ("mistral-window", [WINDOW] * 2, []),
        ("llama4_text", [FULL, ("chunked_attention", *WINDOW[1:])], []),
        ("gemma4_text", [FULL, WINDOW, NOTHING, NOTHING], []),
        ("falcon_h1", [HYBRID] * 2, []),
        ("zamba2", [STATE, HYBRID] * 2, []),
        ("qwen3_next", [FULL, STATE], []),
        ("lfm2", [FULL, ("conv", *STATE[1:])], []),
        ("mamba", [STATE] * 2, []),
        ("glm_moe_dsa", [INDEXED] * 2, []),
        ("bart", [FULL] * 2, [CROSS] * 2),
        ("t5gemma", [FULL, WINDOW], [CROSS] * 2),
        ("vision-encoder-decoder", [FULL] * 2, [CROSS] * 2),
        ("blip-2", [FULL] * 2, []),
    ],
)
def test_the_verdict_on_every_kind_of_layer(name: str, layers: list[Any], cross: list[Any]) -> None:
    verdict = planned(build(name))
    assert verdict.reason == ""
    assert [(layer.kind, layer.stock, layer.layer) for layer in verdict.layers] == layers
    assert [(layer.kind, layer.stock, layer.layer) for layer in verdict.cross] == cross
    for layer in (*verdict.layers, *verdict.cross):
        assert layer.elastic == layer.layer.startswith("Elastic")
        assert layer.why.startswith("stores ")
    assert verdict.elastic == sum(row[2].startswith("Elastic") for row in (*layers, *cross))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "t5gemma", "falcon_h1", "minimax"])
def test_the_verdict_is_a_value_and_changes_nothing(name: str) -> None:
    model = build(name)
    before, table = model.config.to_dict(), dict(compat.layer_types())
    count = elastic_layers(model.config)
    verdict = planned(model)
    assert verdict == planned(model)
    assert hash(verdict) == hash(planned(model))
    assert model.config.to_dict() == before
    assert compat.layer_types() == table
    detach = generation.attach(model)
    assert planned(model) == verdict, "while something is attached"
    assert elastic_layers(model.config) == count
    detach()
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.reason = "x"  # type: ignore[misc]


class NoText(PreTrainedModel):
    pass


@pytest.mark.parametrize(
    ("model_class", "config", "says"),
    [
        (torch.nn.Linear, None, "Linear does not generate text"),
        (NoText, transformers.LlamaConfig(), "NoText does not generate text"),
        (transformers.BertModel, transformers.BertConfig(), "BertModel does not generate text"),
        (
            transformers.MiniMaxForCausalLM,
            transformers.MiniMaxConfig(),
            "MiniMaxForCausalLM keeps its state in its own way",
        ),
        (transformers.RwkvForCausalLM, transformers.RwkvConfig(), "RwkvForCausalLM keeps its state in its own way"),
        (transformers.LlamaForCausalLM, transformers.PreTrainedConfig(), "does not say how many layers"),
    ],
)
def test_the_reason_why_a_model_is_left_alone(model_class: type, config: Any, says: str) -> None:
    assert says in reason_to_leave(model_class, config)
    assert plan(model_class, config) == CachePlan(reason_to_leave(model_class, config))


def test_a_class_of_layer_that_is_not_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that derives from a known one keeps more than keys and values, or does something else with them."""

    class Compressed(DynamicLayer):
        pass

    monkeypatch.setitem(compat.layer_types(), "full_attention", Compressed)
    model = build("qwen2", num_hidden_layers=1)
    (layer,) = planned(model).layers
    assert (layer.stock, layer.layer, layer.elastic) == ("Compressed", "Compressed", False)
    assert __name__ in layer.why
    assert layers_of_a_cache(model) == [Compressed]


def test_a_new_type_of_layer_with_a_known_class_is_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.layer_types(), "global_attention", DynamicLayer)
    model = build("qwen2", num_hidden_layers=1)
    model.config.layer_types = ["global_attention"]
    assert planned(model).elastic == 1
    assert layers_of_a_cache(model) == [ElasticLayer]
    assert compat.layer_types()["global_attention"] is DynamicLayer


def test_a_cache_made_without_a_configuration_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bart")
    made = compat.prepared_caches(model)
    monkeypatch.setattr("ballonet.hooks.kv.cache.prepared_caches", lambda _: [made[0], DynamicCache()])
    assert {(layer.layer, layer.elastic) for layer in planned(model).cross} == {("DynamicLayer", False)}
    assert all("without a configuration" in layer.why for layer in planned(model).cross)


def test_defining_the_elastic_layers_registers_nothing() -> None:
    """transformers enters a class with a `_layer_type` into its tables for the whole process."""
    code = """
        import sys
        from transformers import cache_utils as c
        tables = c.DYNAMIC_LAYER_TYPE_MAPPING, c.STATIC_LAYER_TYPE_MAPPING
        before = [dict(table) for table in tables]
        assert not any(name.startswith("ballonet") for name in sys.modules)
        import ballonet.hooks.kv.generation, ballonet.hooks.kv.cache
        assert [dict(table) for table in tables] == before
    """
    # not a fork of the tests' own programs, which have imported ballonet already
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
