"""How well the cost model of replicas predicts batches that a model really computes: prompts and decoding mixed.

A group of one replica serves the same requests several times. The least time of each batch counts, of the CPU where it
computes (what runs beside it on the machine is not counted), else between two events on the GPU's stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from random import Random

import torch
from common import Figure, Options
from llama import build, few

import ballonet
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.process import Unlearned, measure_cost
from ballonet.hooks.replicas.replica_model import (
    CudaTimeMarks,
    GroupSettings,
    HostTimeMarks,
    Mark,
    Ran,
    ReplicaModel,
    SplicedLayers,
    StageTimes,
)
from ballonet.hooks.replicas.stage import Stage
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.fit_cost import Sample, fit
from ballonet.offload.policy.replicas.groups import alone
from ballonet.offload.policy.tuning import DEFAULT

LAYERS, BATCH, BLOCK = 8, 256, 16  # tokens of a batch, and of a block
REQUESTS, ROUNDS = 48, 5
LIMIT = 0.05  # the paper's (003, §4.3)


def errors(chosen: Options) -> Iterator[tuple[str, str, Figure]]:
    """(what, peer, mean relative error) of predictions: by a cost that is fitted to such batches, for those that were
    held out, and by the one that a replica measures when it starts, with other requests."""
    torch.set_num_threads(1)
    ballonet.install("20GiB" if chosen.cuda else "1GiB")
    layers, tuning = LAYERS, DEFAULT.replicas
    if chosen.tiny:
        layers, tuning = 2, replace(tuning, requests_measured=24, answer_measured=6, rounds_measured=1)
    model = build(few(chosen, layers), chosen.device)
    mark = CudaTimeMarks(torch.device("cuda"), time.perf_counter) if chosen.cuda else HostTimeMarks(time.thread_time)
    with ballonet.manage(model), Splice(model) as splice:
        runs, settings = SplicedLayers(splice), GroupSettings.of(model, BATCH, page_size=BLOCK)
        member = ReplicaModel("one", model, runs, settings)
        first = measure_cost(member, layers, mark, tuning)
        rounds = [list(_batches(member, layers, mark, chosen)) for _ in range(2 if chosen.tiny else ROUNDS)]
    least: dict[tuple[tuple[int, int], ...], float] = {}
    for each in chain(*rounds):
        least[each.sizes] = min(each.end - each.begin, least.get(each.sizes, float("inf")))
    samples = [Sample(sizes, seconds) for sizes, seconds in least.items()]
    mixed = [each for each in samples if len({new == 1 for _, new in each.chunks}) == 2]
    what = f"{layers} layers, {len(samples)} batches, {len(mixed)} of them mixed: mean error of predictions"
    yield what, "fitted to batches, held out", Figure.of([fit(samples).error]).at_most(LIMIT)
    yield what, "as measured at the start", Figure.of([_error(first.cost, samples)])
    yield what, "the same, of mixed batches", Figure.of([_error(first.cost, mixed)])


def _error(cost: ChunkCost, samples: list[Sample]) -> float:
    return statistics.fmean(abs(cost.batch(each.chunks) / each.seconds - 1) for each in samples)


def _batches(member: ReplicaModel, layers: int, mark: Callable[[], Mark], chosen: Options) -> Iterator[Ran]:
    """The batches of one round, the same in each."""
    ran: list[Ran] = []
    times = StageTimes(layers, None, time.perf_counter, mark, ran.append)
    stage = Stage(replace(member, times=times), alone(0, layers), 0, 1, {}, lambda *_: None)
    stage.cache.model = replace(stage.cache.model, costs=Unlearned())
    leader = stage.leader
    assert leader is not None
    random = Random(1)
    for number in range(REQUESTS // 2 if chosen.tiny else REQUESTS):
        prompt = min(900, max(8, round(random.lognormvariate(4.5, 1.0))))
        ids = tuple(random.randrange(member.model.config.vocab_size) for _ in range(prompt))
        leader.requests.add(Request(str(number), ids, 8 + random.randrange(4 if chosen.tiny else 40)))
    while not leader.idle:
        stage.step()
    while not times.all_timed:
        times.poll()
    yield from ran
