"""Requests that run while replicas drop layers and get them back: their tokens stay, and their KV is counted."""

from __future__ import annotations

import pytest

from ballonet.hooks.replicas.local import LocalGroup, Member
from ballonet.hooks.replicas.plan import Sampling
from ballonet.hooks.replicas.regroup import Regroup

from ..serving.batches import prompts
from .grouped import CHUNK, Replicas, Told, evenly, install, requests
from .test_pipeline import four_layers, said

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def group(members: list[Member], stages: int, told: Told, epoch: int = 1) -> LocalGroup:
    layers = members[0].model.config.num_hidden_layers
    return LocalGroup(epoch, members[:stages], evenly(layers, stages), told)


def sectors(of: LocalGroup) -> list[int]:
    for cache in of.caches:
        cache.pool.try_to_free_sectors()
    return [len(cache.pool.used) for cache in of.caches]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window"])
@pytest.mark.parametrize("sampling", [None, Sampling(0, 0.8, 20, 0.95)], ids=["greedy", "sampling"])
def test_tokens_stay_while_spans_change(name: str, sampling: Sampling | None) -> None:
    """One replica, two, four, and one again, in the middle of answers."""
    model, told = four_layers(name), Told()
    asked = requests(prompts(6, 2 * CHUNK), 40, sampling)
    install()
    with Replicas([model] * 1) as members:
        told_alone = Told()
        alone = group(members, 1, told_alone)
        for each in asked:
            alone.add(each)
        alone.run()
        expected = told_alone.answers(asked)
        del alone
    if sampling is None:
        assert expected == said(model, [list(each.prompt) for each in asked], 40)
    with Replicas([four_layers(name) for _ in range(4)]) as members:
        current = group(members, 1, told)
        for each in asked[:4]:
            current.add(each)
        for epoch, stages in enumerate((2, 4, 1), 2):
            for _ in range(12):
                current.step()
            assert len(told.over) < len(asked)
            following = group(members, stages, told, epoch)
            change = Regroup([current], [following], lambda request: 0, 2)
            assert change.left > 0
            if epoch == 2:
                for each in asked[4:]:
                    following.add(each)
            while change.step():
                following.step()
            assert sectors(current) == [0] * len(current.members)
            current = following
        current.run()
        del current, following, change
        assert told.answers(asked) == expected
