"""torch's CUDA graphs as those who listen hear of them: torch's side is played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from ballonet.allocator.captures import CaptureListener, leave, listen

NAMES = ("capture_begin", "capture_end", "replay", "reset")


class Graph:
    """Notes what is called."""

    def __init__(self, heard: list[Any]) -> None:
        self.heard = heard
        self.fails = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.heard.append(f"begin {pool} {capture_error_mode}")
        if self.fails:
            raise RuntimeError("it cannot")

    def capture_end(self) -> None:
        self.heard.append("end")
        if self.fails:
            raise RuntimeError("it came to nothing")

    def replay(self) -> None:
        self.heard.append("replay")

    def reset(self) -> None:
        self.heard.append("reset")


class Hears(CaptureListener):
    def __init__(self, name: str, refuses: bool = False) -> None:
        self.name = name
        self.refuses = refuses

    def begins(self, graph: Any, pool: object) -> None:
        graph.heard.append((self.name, "begins", pool))
        if self.refuses:
            raise ValueError("not now")

    def ended(self, graph: Any, *, captured: bool) -> None:
        graph.heard.append((self.name, "ended", captured))

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        @contextmanager
        def around() -> Iterator[None]:
            graph.heard.append((self.name, "before"))
            yield
            graph.heard.append((self.name, "after"))

        return around()

    def reset(self, graph: Any) -> None:
        graph.heard.append((self.name, "reset"))


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph([])


def stock() -> list[Any]:
    return [vars(Graph)[name] for name in NAMES]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_listeners_come_and_go_in_any_order(graph: Graph, order: tuple[int, int]) -> None:
    before, both = stock(), (Hears("one"), Hears("two"))
    for listener in (*both, both[0]):
        listen(listener)
    graph.capture_begin((0, 1), capture_error_mode="relaxed")
    graph.capture_end()
    assert graph.heard == [
        ("one", "begins", (0, 1)),
        ("two", "begins", (0, 1)),
        "begin (0, 1) relaxed",
        "end",
        ("two", "ended", True),
        ("one", "ended", True),
    ]
    graph.heard.clear()
    first, second = (both[index] for index in order)
    leave(first)
    leave(first)
    graph.replay()
    graph.reset()
    name = second.name
    assert graph.heard == [(name, "before"), "replay", (name, "after"), "reset", (name, "reset")]
    leave(second)
    assert stock() == before
    graph.heard.clear()
    graph.replay()
    assert graph.heard == ["replay"]


def test_a_capture_that_cannot_begin_or_comes_to_nothing(graph: Graph) -> None:
    willing, refusing = Hears("one"), Hears("two", refuses=True)
    listen(willing)
    try:
        graph.fails = True
        for act in (graph.capture_begin, graph.capture_end):
            with pytest.raises(RuntimeError, match="it c"):
                act()
            assert graph.heard.pop() == ("one", "ended", False)
        graph.fails = False
        listen(refusing)
        graph.heard.clear()
        with pytest.raises(ValueError, match="not now"):
            graph.capture_begin(pool=(0, 2))
        assert graph.heard == [
            ("one", "begins", (0, 2)),
            ("two", "begins", (0, 2)),
            ("two", "ended", False),
            ("one", "ended", False),
        ]
    finally:
        leave(willing)
        leave(refusing)


def test_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "CUDAGraph")
    hears = Hears("one")
    with pytest.raises(AttributeError, match="CUDAGraph"):
        listen(hears)
    leave(hears)


def test_torch_has_what_is_wrapped() -> None:
    for name in NAMES:
        assert name in vars(torch.cuda.CUDAGraph)
