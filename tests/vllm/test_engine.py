"""A vLLM engine whose KV cache lies in the pool: the tokens of stock, and pages that follow load and budget."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from .running import MIB, NEEDS_VLLM, PAGE, PYTHON, UNDER, asked, engine

pytestmark = NEEDS_VLLM


def test_pages_follow_the_load(model: Path, stock: Any, tmp_path: Path) -> None:
    answer = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE})
    assert answer["said"] == stock
    kv = [pages["kv"] for pages in answer["pages"]]
    assert max(kv) < answer["pages"][-1]["peak"] <= 16 * MIB // PAGE  # the reservation is 1 GiB


def test_a_small_budget_preempts(model: Path, stock: Any, tmp_path: Path) -> None:
    answer = asked(model, tmp_path, {"budget": "2MiB", "page_size": PAGE})
    assert answer["said"] == stock
    assert answer["pages"][-1]["peak"] <= 2 * MIB // PAGE


def test_the_budget_changes_under_the_engine(model: Path, stock: Any, tmp_path: Path) -> None:
    """From one wave of requests to the next: KV that is kept goes where it has to."""
    answer = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE, "changes": [(1, 2 * MIB), (2, 16 * MIB)]})
    assert answer["said"] == stock
    assert answer["pages"][1]["kv"] <= 2 * MIB // PAGE < answer["pages"][2]["peak"]


def test_no_page_leaves_in_the_middle_of_a_forward(model: Path, stock: Any, tmp_path: Path) -> None:
    answer = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE, "squeeze": 2 * MIB})
    assert answer["refused"] == [True]
    assert answer["said"] == stock


def test_a_map_that_fails_only_preempts(model: Path, stock: Any, tmp_path: Path) -> None:
    answer = asked(model, tmp_path, {"budget": "16MiB", "page_size": PAGE, "fail": 8})
    assert answer["said"] == stock


def test_an_option_that_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    command = engine(model, tmp_path, {"bugdet": "1MiB"})
    ended = subprocess.run(command, capture_output=True, text=True, timeout=UNDER, cwd=tmp_path)
    assert ended.returncode
    assert "bugdet: no option of the connector; it has budget" in ended.stderr


def test_a_version_without_the_patches_is_refused() -> None:
    program = (
        "from vllm.v1.core.block_pool import BlockPool\ndel BlockPool.evict_blocks\n"
        "from ballonet.hooks.vllm import BallonetConnector"
    )
    ended = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=UNDER)
    assert "UnsupportedVersion: vLLM" in ended.stderr
    assert "lacks BlockPool.evict_blocks" in ended.stderr
