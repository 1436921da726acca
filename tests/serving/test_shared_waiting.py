"""Requests of a process that shares a budget, while another process has the pages that they wait for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ballonet
from ballonet.allocator import control
from ballonet.hooks.device import shared_total

from ..models import build
from ..sharing import Process, share_in
from ..tuned import Tuned
from .batches import PAGE, looping, prompts, stock
from .test_trouble import Lacking

MIB = 2**20


@pytest.mark.usefixtures("nothing_is_left")
def test_waiting_requests_get_the_pages_of_an_idle_process(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few looks a request may wait for: others are asked first."""
    share_in(tmp_path, monkeypatch)
    tuned(serving={"lonely": 1}, sharing={"dwell": 0.0, "patience": 60.0, "answer": 60.0})
    model = build("llama", num_hidden_layers=12, max_position_embeddings=2048)
    asked = [3 + n * n % 50 for n in range(1600)]
    expected = model.generate(torch.tensor([asked]), max_new_tokens=6, do_sample=False)[0, len(asked) :].tolist()
    with Process(16 * MIB, "tensors", tmp_path) as process:
        assert process.answer() == "ready"
        assert process.do(f"get {13 * MIB}") == "get"
        process.do("drop")
        ballonet.install(64 * PAGE, page_size=PAGE, host_budget=0, device="cpu")
        with ballonet.manage(model, interval=None, shared_budget=True), looping(model, 6) as manager:
            before = part()
            manager.add_request(asked)
            reply = manager.get_result(timeout=600)
            assert (reply.generated_tokens, reply.error) == (expected, None)
            assert part() > 1.5 * before
            del manager
    control.stop()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_lone_step_that_finds_no_memory_is_tried_again_while_others_have_some(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never, and the request fails once halves of its tokens and then single ones were tried; the next one has its own
    tries, and finds some after two."""
    share_in(tmp_path, monkeypatch)
    tuned(serving={"lonely": 1, "tries": 2})
    model, asked = build("llama", num_hidden_layers=4), prompts(1, 20)[0]
    expected = stock(model, [asked], 6)[0]
    with Process(16 * MIB, "tensors", tmp_path) as process:
        assert process.answer() == "ready"
        assert process.do(f"get {8 * MIB}") == "get"
        ballonet.install(64 * PAGE, page_size=PAGE, host_budget=0, device="cpu")
        with ballonet.manage(model, shared_budget=True), looping(model, 6) as manager:
            never = len(asked).bit_length() - 1 + 3
            for failing, failed in (range(10**6), never), ({1, 4}, 2), ({3, 4}, 2):
                with Lacking(model, lambda step, *_, failing=failing: step in failing) as lacking:  # type: ignore[misc]
                    manager.add_request(asked)
                    reply = manager.get_result(timeout=600)
                assert lacking.failed == failed
                assert (reply.generated_tokens, reply.error) == expected if failed == 2 else "no memory" in reply.error
            del manager
    control.stop()


def part() -> int:
    """Bytes of this process."""
    (row,) = shared_total.change_total(None, None, 60.0)
    return next(entry["part"] for entry in row["parts"] if entry["pid"] == os.getpid())
