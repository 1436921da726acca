"""`ballonet.watch()`: in a notebook what `python -m ballonet top` shows in a terminal."""

from __future__ import annotations

import threading
from html import escape
from importlib import import_module
from typing import Any

from rich.console import Group

from ...allocator.errors import BallonetError
from ...offload.policy.tuning import DEFAULT
from .processes import WatchedProcesses
from .view import NOBODY, as_html, lines_of, process


class Watched:
    """The result of `watch()`: a notebook shows it as `top` does, `print` as lines, each time by a new look. `stop()`
    ends live updates. `live`: does it change by itself?"""

    def __init__(self, processes: WatchedProcesses, period: float, widget: Any = None) -> None:
        """`widget`: an ipywidgets.HTML to keep up to date, or None."""
        self._processes = processes
        self._period = period
        self._widget = widget
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if widget is not None:
            widget.value = self._html()
            self._thread = threading.Thread(target=self._run, name="ballonet-watch", daemon=True)
            self._thread.start()

    @property
    def live(self) -> bool:
        """Does it change by itself?"""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stops live updates. Idempotent."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._period) and not self._processes.ended:
            try:
                self._processes.look()
                self._widget.value = self._html()
            except BallonetError as error:
                self._widget.value = f"<p>{escape(str(error))}</p>"
                return

    def _html(self) -> str:
        return as_html(Group(*map(process, self._processes.seen))) if self._processes.seen else f"<p>{NOBODY}</p>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Renders the widget, or a table of this moment, for a notebook."""
        if self._widget is not None:
            bundle: dict[str, Any] = self._widget._repr_mimebundle_()
            return bundle
        self._processes.look()
        return {"text/html": self._html(), "text/plain": str(self)}

    def __str__(self) -> str:
        return "\n".join(line for seen in self._processes.seen for line in lines_of(seen)) or NOBODY


def watch(pid: int | None = None, every: float = DEFAULT.watching.period) -> Watched:
    """Shows pages by owner, copies per second, streamed layers, KV by tier and the last decisions, of this process and
    all others of this user that run ballonet, or of one.

    `pid`: of that one; `every`: seconds between looks. With ipywidgets it is live until `stop()`; without, a table of
    the moment in which it is shown. NoSuchProcess, NotPermitted, NotReachable for a `pid` that cannot be looked at.
    """
    processes = WatchedProcesses(pid)
    processes.look()
    try:
        widgets = import_module("ipywidgets")
    except ModuleNotFoundError:
        return Watched(processes, every)
    return Watched(processes, every, widgets.HTML())
