"""Steps of generation loops that only decode are computed by CUDA graphs, to stock's tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ballonet

from ..models import build
from ..serving.batches import Answer, answers, prompts
from .decoding import captures, replays
from .scene import Place, scene
from .test_serve_batches import in_order

NEW = 24  # tokens of an answer
RECORDED = 3  # first steps of a program, which are computed eagerly, and looked at


def stock(place: Place, model: Any, asked: list[list[int]]) -> list[Answer]:
    """What a model answers that nothing manages."""
    with in_order():
        actual = answers(model, asked, NEW, num_blocks=16 * len(asked))
    place.synchronize()
    return actual


@scene(only="cuda", pages=256)
def test_decoding_steps_of_loops_are_replayed_with_rows_padded_to_few_sizes(place: Place) -> None:
    """Up to eight requests at once have one program, nine another one."""
    model = build("llama").to(place.kind)
    asked = [prompts(count, 6) for count in (3, 5, 8, 9, 4)]
    expected = [stock(place, model, batch) for batch in asked]
    with ballonet.manage(model) as managed:
        for batch, right, programs in zip(asked, expected, (1, 1, 1, 2, 2), strict=True):
            before = replays(managed)
            assert answers(model, batch, NEW) == right
            assert captures(managed) == programs
            assert replays(managed) - before >= NEW - 1 - RECORDED, "steps were computed eagerly"
        assert not managed.report().pieces.why


@scene(only="cuda", pages=256)
def test_loops_of_two_models_at_once_are_replayed_each_by_its_own_graphs(place: Place) -> None:
    both = [build(name).to(place.kind) for name in ("llama", "qwen3")]
    asked = prompts(6, 6)
    expected = [stock(place, model, asked) for model in both]
    managed = [ballonet.manage(model) for model in both]
    for _ in range(2):
        before = [replays(owner) for owner in managed]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda model: answers(model, asked, NEW), both)) == expected
        assert all(replays(owner) - old >= NEW - 1 - RECORDED for owner, old in zip(managed, before, strict=True))
    for owner in managed:
        owner.release()
