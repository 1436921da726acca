"""What microbatches take on this machine, measured on the model as it is served.

Note [Measured as served]
    A forward of the whole model with one prompt says little of a batch: there KV lies in blocks, chunks of several
    requests are computed together, and others decode beside them. A cost that was fitted to such forwards was wrong by
    56 % of what batches took, one that is fitted to batches by 11 % (a loaded machine, benchmarks/batch_cost.py). So a
    group of one replica serves made-up requests, which come one after the other, as its stages will.

    What disturbs a batch shows in single runs, so the least of several counts; and so the batches are the same in each
    round: a scheduler that learns what steps take chooses others each time, most of which come once.
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
    """Serves the same requests several times, and fits a cost to the least that each batch took: what disturbs a batch,
    or loads kernels, makes it longer. Where that says nothing it is done again, as all of it may have been disturbed.
    `layers`: of the model. ValueError where it says nothing in the end; torch.OutOfMemoryError."""
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
    """The batches of one round, the same in each."""
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
    """Costs of steps with which batches do not depend on what earlier ones took, and the layers of the model stay: what
    is measured is not their copies."""

    def observe(self, step: Step, seconds: float) -> None:
        """Learns nothing."""

    def faster(self, one: Step, other: Step) -> bool:
        """Prefers the step whose memory the layers do not give."""
        return True


def sample_requests(tuning: Replicas, most: int) -> Iterator[Request]:
    """Requests with prompts of some batches of `most` tokens, but most are short. The last one outlives the others, so
    that there are batches with one row."""
    random, longest, last = Random(0), tuning.answer_measured, tuning.requests_measured - 1
    for number in range(tuning.requests_measured):
        prompt = max(2, round(most * tuning.batches_measured * random.random() ** 4))
        new = random.randrange(longest) if number < last else longest + longest // 4
        yield Request(f"measured {number}", (0,) * prompt, 2 + new)
