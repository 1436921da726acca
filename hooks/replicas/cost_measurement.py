"""Measures the cost of microbatches on this machine, on the model as it is served.

Note [Measured as served]
    A forward of the whole model with one prompt says little about a batch, in which KV lies in blocks, chunks of
    several requests are computed together, and other requests decode. A cost fitted to such forwards was wrong by 56 %
    of the batches' times, one fitted to batches by 11 % (a loaded machine). So a group of one replica serves synthetic
    requests, which arrive one after the other, as its stages will.

    Disturbances only make a run longer, so the least time of several rounds counts. The batches have to be the same in
    each round; a scheduler that learns the costs of steps would choose others each time, so it does not learn here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from ...allocator.errors import RequestTooLarge
from ...offload.policy.replicas.fit_cost import Fit, Sample, fit
from ...offload.policy.replicas.groups import alone
from ...offload.policy.step_costs import Step, StepCosts
from ...offload.policy.tuning import DEFAULT, Replicas
from .replica_model import ReplicaModel
from .requests import Request
from .stage import Stage
from .stage_times import Mark, Ran, StageTimes


def measure_cost(
    member: ReplicaModel, layers: int, mark: Callable[[], Mark], tuning: Replicas = DEFAULT.replicas
) -> Fit:
    """Serves the same requests several times, and fits a cost to the least time of each batch. Repeats that where no
    cost can be fitted, as all rounds may have been disturbed. `layers`: of the model; `mark`: records marks on the
    device. ValueError where no cost can be fitted in the end; torch.OutOfMemoryError."""
    least: dict[tuple[tuple[int, int], ...], float] = {}
    for left in reversed(range(tuning.tries_measured)):
        for _ in range(tuning.rounds_measured):
            for each in _batches(member, layers, mark, tuning):
                least[each.sizes] = min(each.end - each.begin, least.get(each.sizes, float("inf")))
        try:
            return fit([Sample(sizes, seconds) for sizes, seconds in least.items()], tuning)
        except ValueError:
            if not left:
                raise
    raise AssertionError("it is tried at least once")


def _batches(member: ReplicaModel, layers: int, mark: Callable[[], Mark], tuning: Replicas) -> Iterator[Ran]:
    """Yields the batches of one round, the same in each round."""
    ran: list[Ran] = []
    times = StageTimes(layers, None, lambda: 0.0, mark, ran.append)
    stage = Stage(replace(member, times=times), alone(0, layers), 0, 0, {}, lambda request, error: None)
    stage.cache.model = replace(stage.cache.model, costs=Unlearned())
    leader = stage.leader
    assert leader is not None
    for request in sample_requests(tuning, int(member.settings.batching.max_batch_tokens)):
        try:
            leader.requests.add(request)
        except RequestTooLarge:
            continue
        stage.step()
    while not leader.idle:
        stage.step()
    while not times.all_timed:
        times.poll()
    yield from ran


class Unlearned(StepCosts):
    """Costs of steps that learn nothing, so batches do not depend on earlier times, and that keep the layers resident,
    so their copies are not measured."""

    def observe(self, step: Step, seconds: float) -> None:
        """Learns nothing."""

    def faster(self, one: Step, other: Step) -> bool:
        """Prefers the step for which no layers are evicted."""
        return True


def sample_requests(tuning: Replicas, most: int) -> Iterator[Request]:
    """Yields synthetic requests: most prompts are short, the longest have some batches of `most` tokens. The last
    request outlives the others, so there are batches with one row."""
    random, longest, last = Random(0), tuning.answer_measured, tuning.requests_measured - 1
    for number in range(tuning.requests_measured):
        prompt = max(2, round(most * tuning.batches_measured * random.random() ** 4))
        new = random.randrange(longest) if number < last else longest + longest // 4
        yield Request(f"measured {number}", (0,) * prompt, 2 + new)
