"""Rung 7 of the ladder: layers that other replicas of a model hold as well, which could be dropped (KunServe §4.1).

Note [A wish, and a plan]
    To drop layers takes the consent of the controller of the replicas: it knows who else holds them, and whether that
    would help at all. So nothing of it is on the list that the core takes from. Whoever goes down the ladder and finds
    too little up to rung 6 says here how many pages are lacking; that is posted as a wish, once no lock is held, and
    frees nothing by itself. What the controller decides comes later, as a plan (hooks/replicas/held_layers.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Duplicates:
    """Whoever can drop layers of this device, and the pages that are wished for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[Callable[[int], object], Callable[[], int]]] = []
        self._lacking = 0

    def register(self, wanted: Callable[[int], object], pages: Callable[[], int]) -> Callable[[], None]:
        """`wanted(pages)` is told of wishes, on any thread, and returns at once; `pages()`: device pages that a drop
        would free at most. Returns what ends that."""
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
        """Can anyone drop layers?"""
        return bool(self._known)

    @property
    def lacking(self) -> int:
        """Pages that have not been wished for yet."""
        return self._lacking

    def note_shortage(self, pages: int) -> None:
        """Notes that so many pages were not found up to rung 6. For whoever holds a lock: it is posted later."""
        if pages > 0 and self._known:
            with self._lock:
                self._lacking += pages

    def post(self) -> None:
        """Tells of what is lacking, where anything is. The caller holds no lock of the governor's."""
        if not self._lacking:
            return
        with self._lock:
            pages, self._lacking, known = self._lacking, 0, tuple(self._known)
        for wanted, _ in known if pages else ():
            wanted(pages)

    def request_drop(self, pages: int) -> None:
        """Posts that so many pages are lacking."""
        self.note_shortage(pages)
        self.post()
