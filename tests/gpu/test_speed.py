"""cuDNN's attention is off while models decode by pieces; and the benchmark of their speed runs where graphs are."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.backends import cuda

import ballonet

from .scene import ROOT, Place, run, scene
from .stock import questions, tiny


@scene(pages=256)
def test_cudnn_s_attention_is_off_while_a_model_has_pieces(place: Place) -> None:
    models = [tiny("llama", place) for _ in range(3)]
    ids = questions("llama", place.kind)["input_ids"]
    assert cuda.cudnn_sdp_enabled()
    with ballonet.manage(models[0], pieces=None):
        assert cuda.cudnn_sdp_enabled(), "who has no pieces leaves it alone"
    first = ballonet.manage(models[0])
    assert cuda.cudnn_sdp_enabled() is not place.cuda
    second = ballonet.manage(models[1])
    ballonet.manage(models.pop())
    first.release()
    for model in models:
        with torch.no_grad():
            model.generate(ids, max_new_tokens=8, pad_token_id=0)
    assert cuda.cudnn_sdp_enabled() is not place.cuda
    second.release()
    gc.collect()
    assert cuda.cudnn_sdp_enabled(), "the third one is collected"


@pytest.mark.gpu
def test_the_benchmark_runs_and_logits_of_pieces_are_those_of_eager_code(tmp_path: Path) -> None:
    """On the simulated device: on a GPU the benchmark itself is the next step of this part."""
    if "SIMGPU_HOME" not in os.environ:
        pytest.skip("on a GPU it runs with its own sizes")
    out = tmp_path / "figure.json"
    program = [sys.executable, str(ROOT / "benchmarks" / "bench_speed.py"), "--tiny", "--out", str(out)]
    run(program)
    result = json.loads(out.read_text())
    rows = {row[0]: dict(zip(result["columns"], row, strict=True)) for row in result["rows"]}
    assert rows["largest difference of a logit"]["pieces"]["median"] == 0
    assert "CUDA graphs, fine cuts" in rows["how it decodes"]["pieces"]
    prompts = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"] if "prefill of" in row[0]]
    asked = {name for cells in prompts for name, cell in cells.items() if isinstance(cell, dict) and "median" in cell}
    assert asked >= {"stock", "stock, cuDNN off", "no pieces", "pieces", "plans kept"}
    assert rows["MiB of graphs, 4 sequences"]["pieces"]["median"] > 0
