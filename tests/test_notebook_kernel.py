"""Real Jupyter kernels: what `ballonet.watch()` publishes, a live widget or a table, and examples/first.ipynb.

To watch, the kernel looks at the process of the tests, so that it imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices

from .hub import made_chat_model, variables_of
from .pool import take_out

pytest.importorskip("ipykernel", reason="a notebook kernel needs ipykernel, which this environment lacks")
from jupyter_client.manager import KernelManager
from transformers import AutoModelForCausalLM, AutoTokenizer

ME = os.getpid()
SECONDS = 120  # that a message may take: only one that never comes takes them
PATIENT = """
from ballonet.hooks.watch.processes import WatchedProcesses
WatchedProcesses.__init__.__kwdefaults__["patience"] = 600.0
"""
TABLE = "text/html"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: the path of a socket may have 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="b-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    ballonet.install("8MiB", page_size=65536, device="cpu")
    yield
    take_out()


class Kernel:
    """A kernel in a process of its own, and all that it has published. Its sockets and files are in `folder`."""

    def __init__(self, folder: Path, variables: Mapping[str, str] = os.environ) -> None:
        environment = {**variables, "IPYTHONDIR": str(folder / "i"), "JUPYTER_RUNTIME_DIR": str(folder / "r")}
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", ip=str(folder / "k"), connection_file=str(folder / "k.json")
        )
        self.manager.start_kernel(env=environment)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)
        self.published: list[dict[str, Any]] = []

    def published_by(self, cell: str) -> list[dict[str, Any]]:
        """Runs the cell, which must not fail. Returns what it publishes."""
        asked = self.client.execute(cell)
        mine = [message for message in self.until(lambda each: self._is_done(each, asked)) if _belongs(message, asked)]
        failed = [message["content"] for message in mine if message["msg_type"] == "error"]
        assert failed == []
        return mine

    def run(self, cell: str) -> dict[str, Any]:
        """What the cell shows, by MIME type."""
        (shown,) = values_of(self.published_by(cell))
        return shown

    def until(self, there: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """What is published from now on, up to the message of which that is true."""
        came: list[dict[str, Any]] = []
        while not came or not there(came[-1]):
            try:
                came.append(self.client.get_iopub_msg(timeout=SECONDS))
            except Empty:
                raise AssertionError(f"it never came: {came[-3:]}") from None
        self.published += came
        return came

    def value_of(self, widget: str) -> list[str]:
        """All that the widget of that id has shown so far."""
        return [value for message in self.published if (value := _value(message, widget))]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    @staticmethod
    def _is_done(message: dict[str, Any], asked: str) -> bool:
        idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
        return idle and _belongs(message, asked)


def _belongs(message: dict[str, Any], asked: str) -> bool:
    return bool(message["parent_header"].get("msg_id") == asked)


def _value(message: dict[str, Any], widget: str) -> str:
    """What a message has the widget of that id show, "" where it is about something else."""
    content = message["content"]
    return str(content["data"].get("state", {}).get("value", "")) if content.get("comm_id") == widget else ""


def values_of(published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of cells that published that, by MIME type."""
    return [dict(message["content"]["data"]) for message in published if message["msg_type"] == "execute_result"]


def printed(published: list[dict[str, Any]]) -> str:
    """What a cell that published that has printed."""
    streams = [message["content"] for message in published if message["msg_type"] == "stream"]
    return "".join(stream["text"] for stream in streams if stream["name"] == "stdout")


def text_of(html: str) -> str:
    return re.sub("<[^>]*>", "", html)


@pytest.fixture
def kernel(folder: Path, installed: None) -> Iterator[Kernel]:
    opened = Kernel(folder)
    yield opened
    opened.close()


def test_a_kernel_publishes_a_live_widget_and_a_table_where_there_are_none(kernel: Kernel) -> None:
    pytest.importorskip("ipywidgets", reason="a live widget needs ipywidgets, which this environment lacks")
    shown = kernel.run(f"{PATIENT}\nimport ballonet\nseen = ballonet.watch({ME}, every=0.05)\nseen")
    widget = shown[WIDGET]["model_id"]
    (first, *_) = kernel.value_of(widget)
    assert f"process {ME} · " in first
    assert re.search(f"pages +weights +{'░' * 40} 0B, 0 pages", text_of(first)), first
    assert "budget 8MiB" in first

    ballonet.set_budget("4MiB")
    devices.of().events.decided("kv", "reclaim", 3, what="<KV>")
    kernel.until(lambda message: "&lt;KV&gt;" in _value(message, widget))
    last = kernel.value_of(widget)[-1]
    assert "budget 4MiB" in last
    assert "kv, reclaim: 3 pages (192KiB) of &lt;KV&gt;" in last

    assert kernel.run("seen.stop()\nseen.live")["text/plain"] == "False"
    table = kernel.run(f"import sys\nsys.modules['ipywidgets'] = None\nballonet.watch({ME})")
    assert WIDGET not in table
    assert re.search("copies +none", text_of(table[TABLE])), table[TABLE]
    assert "budget 4MiB" in table[TABLE]
    assert re.search(rf"process {ME} · [^$]*no model is managed; 4MiB of 4MiB free", table["text/plain"])
    assert kernel.run("'torch' in sys.modules")["text/plain"] == "False"


def answer_of_stock(model: Path) -> str:
    """What the notebook's question is answered by stock."""
    tokenizer, stock = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = stock.generate(**inputs, max_new_tokens=64)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_first_notebook_prints_stock_s_answer_with_more_memory_and_with_less(folder: Path) -> None:
    """The cells as they stand there, with a model made here under the name that they load."""
    notebook = json.loads((Path(__file__).parent.parent / "examples" / "first.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
    model = made_chat_model(folder / "model")
    kernel = Kernel(folder, variables_of(folder / "hub", model))
    try:
        published = [kernel.published_by("".join(cell["source"])) for cell in cells]
    finally:
        kernel.close()
    stock = answer_of_stock(model)
    assert stock
    assert [text for text in map(printed, published) if text] == [f"{stock}\n"] * 2
    begun, ended, _ = [text_of(value.get(TABLE, "")) for values in map(values_of, published) for value in values]
    assert "none of them streamed" in begun
    assert re.search(r"[1-9]\d* of them streamed through", ended), ended
