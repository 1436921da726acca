"""Rung 7 of the ladder: layers that other replicas of a model hold as well, which could be dropped (KunServe §4.1).

Note [A request, and a plan]
    To drop layers takes the consent of the controller of the replicas: it knows who else holds them, and whether that
    would help at all. So no duplicated layer is on the list that the core takes from. A caller that goes down the
    ladder and finds too little up to rung 6 notes here how many pages are lacking; that is posted as a request, once no
    lock is held, and frees nothing by itself. The controller's decision comes later, as a plan
    (hooks/replicas/held_layers.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Duplicates:
    """Registered droppers of duplicated layers, and pages still requested. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[Callable[[int], object], Callable[[], int]]] = []
        self._lacking = 0

    def register(self, wanted: Callable[[int], object], pages: Callable[[], int]) -> Callable[[], None]:
        """Registers a dropper. `wanted(pages)` is called with requests, on any thread, and returns at once; `pages()`:
        device pages that a drop would free at most. Returns a function that ends the registration."""
        entry = wanted, pages
        with self._lock:
            self._known.append(entry)

        def withdraw() -> None:
            with self._lock:
                if entry in self._known:
                    self._known.remove(entry)

        return withdraw

    @property
    def pages(self) -> int:
        """Device pages that drops would free at most."""
        with self._lock:
            known = tuple(self._known)
        return sum(pages() for _, pages in known)

    @property
    def known(self) -> bool:
        """Is any dropper registered?"""
        return bool(self._known)

    @property
    def lacking(self) -> int:
        """Pages noted as short that have not been requested yet."""
        return self._lacking

    def note_shortage(self, pages: int) -> None:
        """Notes that so many pages were not found up to rung 6. Callers may hold a lock: `post` comes later."""
        if pages > 0 and self._known:
            with self._lock:
                self._lacking += pages

    def post(self) -> None:
        """Requests the pages noted as short, if any. The caller holds no lock of the governor's."""
        if not self._lacking:
            return
        with self._lock:
            pages, self._lacking, known = self._lacking, 0, tuple(self._known)
        for wanted, _ in known if pages else ():
            wanted(pages)

    def request_drop(self, pages: int) -> None:
        """Requests so many pages at once."""
        self.note_shortage(pages)
        self.post()
