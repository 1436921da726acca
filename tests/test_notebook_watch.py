"""`ballonet.watch()` where ipywidgets is there: a live widget. In a real kernel: test_notebook_kernel.py."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import ballonet
from ballonet.allocator import control
from ballonet.allocator.errors import NoSuchProcess, NotReachable

from .pool import take_out
from .test_watch import gone

ME = os.getpid()
SECONDS = 120


class HTML:
    """Stands for ipywidgets.HTML: keeps what it was given."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.came = threading.Condition()

    @property
    def value(self) -> str:
        return self.values[-1]

    @value.setter
    def value(self, text: str) -> None:
        with self.came:
            self.values.append(text)
            self.came.notify_all()

    def shows(self, pattern: str) -> None:
        """Waits until it does."""
        with self.came:
            assert self.came.wait_for(lambda: re.search(pattern, self.value), SECONDS), self.value

    def _repr_mimebundle_(self) -> dict[str, Any]:
        return {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process but this one is looked for."""
    monkeypatch.setattr(control, "listening", lambda folders: [])
    monkeypatch.setitem(sys.modules, "ipywidgets", None)


@pytest.fixture
def installed() -> Iterator[None]:
    ballonet.install("8MiB", page_size=65536, device="cpu")
    yield
    take_out()


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ipywidgets")
    module.HTML = HTML  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipywidgets", module)


@pytest.mark.usefixtures("installed", "widgets")
def test_a_widget_changes_until_it_is_stopped() -> None:
    seen = ballonet.watch(every=0.01)
    widget: HTML = seen._widget
    assert "application/vnd.jupyter.widget-view+json" in seen._repr_mimebundle_()
    assert "budget 8MiB" in widget.values[0]
    ballonet.set_budget("4MiB")
    widget.shows("budget 4MiB")
    assert seen.live
    seen.stop()
    seen.stop()
    assert not seen.live
    count = len(widget.values)
    time.sleep(0.05)
    assert len(widget.values) == count


@pytest.mark.usefixtures("widgets")
def test_a_widget_says_that_there_is_nothing_more_to_see() -> None:
    ballonet.install("8MiB", page_size=65536, device="cpu")
    seen = ballonet.watch(ME, every=0.01)
    try:
        seen._widget.shows("budget 8MiB")
    finally:
        take_out()
    seen._widget.shows("ballonet is not installed in it")
    seen.stop()


def test_where_nobody_is_there_it_says_so() -> None:
    seen = ballonet.watch()
    assert "no process of yours runs ballonet" in str(seen)
    assert "no process of yours runs ballonet" in seen._repr_mimebundle_()["text/html"]


def test_a_process_that_cannot_be_watched_is_an_error() -> None:
    with pytest.raises(NoSuchProcess, match="does not exist"):
        ballonet.watch(gone())
    with pytest.raises(NotReachable, match=r"call ballonet\.install\(\)"):
        ballonet.watch(ME)
