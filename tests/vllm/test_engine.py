"""A vLLM engine whose KV cache lies in the pool: the tokens of stock, with pages that follow the load and the budget.

vLLM is no dependency: `make test-vllm` makes an environment with it, and says so here by BALLONET_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PYTHON = os.environ.get("BALLONET_VLLM_PYTHON")
PAGE = 2**16
ENGINE = Path(__file__).parent / "engine.py"
UNDER = 1200  # seconds, on a machine that is busy

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM in an environment of its own: make test-vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, as vLLM's kernels for CPUs want it: heads of 32."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=199,
        max_position_embeddings=1024,
    )
    made = transformers.LlamaForCausalLM(config)
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the engine says without the connector."""
    return asked(model, tmp_path_factory.mktemp("stock"), None)["said"]


def asked(model: Path, folder: Path, options: dict[str, Any] | None) -> dict[str, Any]:
    """What engine.py writes."""
    assert PYTHON is not None
    answers = folder / "answers.json"
    subprocess.run(
        [PYTHON, str(ENGINE), str(model), str(answers), json.dumps(options)], check=True, timeout=UNDER, cwd=folder
    )
    found: dict[str, Any] = json.loads(answers.read_text())
    return found


def test_pages_follow_the_load(model: Path, stock: Any, tmp_path: Path) -> None:
    found = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE})
    assert found["said"] == stock
    kv = [each["kv"] for each in found["pages"]]
    assert max(kv) < found["pages"][-1]["peak"] <= 16 * 2**20 // PAGE  # the reservation is 1 GiB


def test_a_small_budget_preempts(model: Path, stock: Any, tmp_path: Path) -> None:
    found = asked(model, tmp_path, {"budget": "2MiB", "page_size": PAGE})
    assert found["said"] == stock
    assert found["pages"][-1]["peak"] <= 2 * 2**20 // PAGE


def test_the_budget_changes_under_the_engine(model: Path, stock: Any, tmp_path: Path) -> None:
    """From one wave of requests to the next: KV that is kept goes where it has to."""
    found = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE, "changes": [(1, 2**21), (2, 2**24)]})
    assert found["said"] == stock
    assert found["pages"][1]["kv"] <= 2**21 // PAGE < found["pages"][2]["peak"]


def test_a_map_that_fails_only_preempts(model: Path, stock: Any, tmp_path: Path) -> None:
    found = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE, "fail": 8})
    assert found["said"] == stock


def test_an_option_that_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    assert PYTHON is not None
    ended = subprocess.run(
        [PYTHON, str(ENGINE), str(model), str(tmp_path / "x"), json.dumps({"bugdet": "1MiB"})],
        capture_output=True,
        text=True,
        timeout=UNDER,
        cwd=tmp_path,
    )
    assert ended.returncode
    assert "bugdet: no option of the connector; it has budget" in ended.stderr


def test_a_version_without_the_seams_is_refused() -> None:
    assert PYTHON is not None
    program = (
        "from vllm.v1.core.block_pool import BlockPool\ndel BlockPool.evict_blocks\n"
        "from ballonet.hooks.vllm import BallonetConnector"
    )
    ended = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=UNDER)
    assert "UnsupportedVersion: vLLM" in ended.stderr
    assert "lacks BlockPool.evict_blocks" in ended.stderr
