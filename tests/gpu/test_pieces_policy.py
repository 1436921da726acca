"""What is known of decoding by pieces: its times, how it is told, and where a preflight found graphs wrong."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

import ballonet
from ballonet.allocator import devices, info
from ballonet.allocator.config import Config
from ballonet.hooks.managed import pace_of, residency_of
from ballonet.hooks.pieces.outlook import foreseen
from ballonet.hooks.profile import Grid, measured
from ballonet.offload.record.record import Record

from .. import models
from .scene import Place, scene

MANY: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


def decoded(place: Place, name: str) -> tuple[Any, Any]:
    model: Any = models.build(name).to(place.kind).eval()
    managed = ballonet.manage(model)
    prompt = {key: value.to(place.kind) for key, value in models.prompts(1, 8).items()}
    model.generate(**prompt, **MANY)
    return model, managed


@scene(pages=128)
@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "bloom"])
def test_a_model_decodes_as_its_configuration_foretells_and_its_steps_are_learned(place: Place, name: str) -> None:
    model, managed = decoded(place, name)
    report, timings = managed.report().pieces, residency_of(managed).timings
    if not place.cuda:
        assert report is None
        return
    way, why = foreseen(type(model), model.config)
    assert (report.way, bool(report.why)) == (way, bool(why))
    assert timings.record is not None
    assert {point.phase for point in timings.record.points} == {"prefill", "decode" if way == "eager" else "pieces"}
    times, left = measured(model, pace_of(managed), Record({}, 1.0), Grid(batch=1, length=8))
    assert (times.decoding, left) == ("decode" if way == "eager" else "pieces", {})


@scene(pages=128)
def test_no_model_decodes_by_graphs_that_a_preflight_found_wrong(place: Place) -> None:
    devices.of().why_no_graphs = "a preflight found graphs wrong: because"
    _, managed = decoded(place, "llama")
    report = managed.report().pieces
    assert (None if report is None else str(report)) == (
        "eager (a preflight found graphs wrong: because)" if place.cuda else None
    )


@scene(pages=16)
@pytest.mark.parametrize("setting", ["auto", "none"])
def test_info_says_that_cudnn_s_attention_is_off_where_models_decode_by_graphs(place: Place, setting: str) -> None:
    with mock.patch.dict(os.environ, BALLONET_PIECES=setting):
        works = {check["name"]: check["works"] for check in info.gather(Config(), "")["checks"]}
    if place.cuda:
        assert works["decoding by CUDA graphs"] == (setting == "auto")
    assert works.get("cuDNN's attention", True) == (setting == "none" or not place.cuda)
