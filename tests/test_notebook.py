"""A notebook: cells in a real IPython shell, run again, interrupted, and what they show."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from ballonet.allocator import devices
from ballonet.allocator.stats import Stats
from ballonet.allocator.units import table

from .pool import take_out
from .test_stats import EVENTS, SNAPSHOT

MODEL = """
import torch, ballonet
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
prompt = torch.arange(2, 12)[None]
"""
LOAD = "%env BALLONET_DEVICE=cpu\n%env BALLONET_BUDGET=64MiB\n%env BALLONET_PAGE_SIZE=4KiB\n%load_ext ballonet"
GENERATE = "tokens = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False).tolist()"


class Notebook:
    def __init__(self) -> None:
        self.shell = InteractiveShell()

    def run(self, cell: str) -> Any:
        """The value of the cell. Raises what the cell raises; a notebook only shows it."""
        done = self.shell.run_cell(cell, store_history=True)
        done.raise_error()
        return done.result

    def shown(self, cell: str) -> str:
        """The HTML that the notebook shows for the cell's value."""
        data, _ = self.shell.display_formatter.format(self.run(cell))
        return str(data["text/html"])

    def forget_error(self) -> None:
        """The shell keeps the last traceback, and that the frames with the cache that was being filled."""
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        self.shell.InteractiveTB.tb = self.shell.last_execution_result = None

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]


@pytest.fixture
def notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the shell takes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened = Notebook()
    with patch.dict(os.environ):  # cells set variables
        yield opened
    opened.run("%unload_ext ballonet")
    opened.forget_error()
    opened.shell.reset()
    opened.shell.history_manager.end_session()
    del opened
    take_out()
    torch.set_num_threads(threads)


def kept() -> tuple[int, int, int]:
    gc.collect()
    device = devices.require()
    device.reap(wait=True)
    device.check()
    pages = device.snapshot()["pages"]
    return pages["weights"], pages["kv"], pages["pending_free"]


def test_cells_run_again_and_nothing_piles_up(notebook: Notebook) -> None:
    notebook.run(MODEL + GENERATE)
    stock = notebook["tokens"]
    notebook.run(LOAD)
    first = None
    for _ in range(3):
        notebook.run("%load_ext ballonet\nballonet.install('64MiB')")
        notebook.run(MODEL)
        for _ in range(2):
            notebook.run(GENERATE)
            assert notebook["tokens"] == stock
        first = first or kept()
        assert kept() == first
        assert first[0] > 0
        assert first[1:] == (0, 0)


def test_an_interrupted_cell_can_be_run_again(notebook: Notebook) -> None:
    notebook.run(LOAD)
    notebook.run(MODEL + GENERATE)
    stock, before = notebook["tokens"], kept()
    layer = notebook["model"].model.layers[1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = layer.mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        notebook.run(GENERATE)
    handle.remove()
    notebook.run(GENERATE)
    assert notebook["tokens"] == stock
    notebook.forget_error()
    assert kept() == before


def test_managed_models_and_stats_are_shown_as_tables(notebook: Notebook) -> None:
    notebook.run(LOAD)
    notebook.run(MODEL)
    shown = notebook.shown("managed = ballonet.manage(model)\nmanaged")
    handle = notebook["managed"]
    assert "LlamaForCausalLM" in shown
    pages = handle.report().pages
    assert cells(shown)["layers"] == ["2, none of them streamed"]
    assert cells(shown)["weights"][0].startswith(f"{pages:,} pages (")
    assert notebook.run("ballonet.manage(model)") is handle, "a cell that runs again"
    shown = notebook.shown("ballonet.stats()")
    assert cells(shown)["weights"][0] == f"{pages:,}"
    assert "64MiB" in shown
    notebook.run("managed.release()")
    assert cells(notebook.shown("managed"))["managed"] == ["no more"]


def cells(html: str) -> dict[str, list[str]]:
    """First cell of each row -> the others."""
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    return {row[0]: row[1:] for row in rows if row}


def test_stats_as_a_table() -> None:
    shown = cells(Stats.of(SNAPSHOT, EVENTS)._repr_html_())
    assert shown["free"] == ["1", "4KiB"]
    assert shown["kv"] == ["3", "12KiB"]
    assert shown["all pages"] == ["6", "24KiB"]
    assert shown["on the host"] == ["4", "16KiB"]
    assert shown["spilled there"] == ["12", "48KiB"]
    assert shown["copied: weights_d2h"] == ["", "6B"]
    assert shown["idle activations, reclaim: 2 times"] == ["13", "52KiB"]


def test_a_table_shows_text_as_text() -> None:
    shown = table("a < b", ("what", "how many"), [("<script>", 1234)])
    assert "<script>" not in shown
    assert "a &lt; b" in shown
    assert cells(shown) == {"&lt;script&gt;": ["1,234"]}
    assert 'right">1,234' in shown
    assert 'left">&lt;' in shown
