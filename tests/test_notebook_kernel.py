"""`ballonet.watch()` in a real Jupyter kernel: what it publishes to the notebook, a live widget or a table.

The kernel watches the process of the tests, so that it imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices

from .pool import take_out

pytest.importorskip("ipykernel", reason="a notebook kernel needs ipykernel, which this environment lacks")
from jupyter_client.manager import KernelManager

ME = os.getpid()
SECONDS = 120  # that a message may take: only one that never comes takes them
PATIENT = """
from dataclasses import replace
from ballonet.hooks.watch.processes import DEFAULT, WatchedProcesses
WatchedProcesses.__init__.__kwdefaults__["tuning"] = replace(DEFAULT.watching, patience=600.0)
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

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "IPYTHONDIR": str(folder / "i"), "JUPYTER_RUNTIME_DIR": str(folder / "r")}
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", ip=str(folder / "k"), connection_file=str(folder / "k.json")
        )
        self.manager.start_kernel(env=environment)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)
        self.published: list[dict[str, Any]] = []

    def run(self, cell: str) -> dict[str, Any]:
        """What the cell shows, by MIME type."""
        asked = self.client.execute(cell)
        mine = [message for message in self.until(lambda each: self._is_done(each, asked)) if _belongs(message, asked)]
        failed = [message["content"] for message in mine if message["msg_type"] == "error"]
        assert failed == []
        (shown,) = [message["content"]["data"] for message in mine if message["msg_type"] == "execute_result"]
        return dict(shown)

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
