"""`ballonet.watch()`: in a notebook what `python -m ballonet top` shows in a terminal."""

from __future__ import annotations

import threading
from html import escape
from importlib import import_module
from typing import Any

from ...allocator.display import table
from ...allocator.errors import BallonetError
from ...offload.policy.tuning import DEFAULT
from .lines import lines_of
from .processes import SeenProcess, WatchedProcesses
from .view import NOBODY
from .wording import bar, sections_of, title_of


class Watched:
    """The result of `watch()`: a notebook shows it as tables, `print` as lines, each time by a new look. `stop()` ends
    live updates. `live`: does it change by itself?"""

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
        return "".join(_shown(each) for each in self._processes.seen) or f"<p>{NOBODY}</p>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Renders the widget, or a table of this moment, for a notebook."""
        if self._widget is not None:
            found: dict[str, Any] = self._widget._repr_mimebundle_()
            return found
        self._processes.look()
        return {"text/html": self._html(), "text/plain": str(self)}

    def __str__(self) -> str:
        return "\n".join(line for each in self._processes.seen for line in lines_of(each)) or NOBODY


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


def _shown(seen: SeenProcess) -> str:
    trouble = f"<p>{escape(seen.trouble)}</p>" if seen.trouble else ""
    rows = [
        (
            section.title if not number else "",
            row.name,
            "" if row.part is None else bar(row.part, DEFAULT.watching.bar // 2),
            row.text,
        )
        for section in sections_of(seen)
        for number, row in enumerate(section.rows)
    ]
    return trouble + table(title_of(seen), ("", "what", "part", "how much"), rows)
