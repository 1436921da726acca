"""One step of a generation loop, and what ballonet changes in it, so that no request is lost and the loop lives. The
life of a request is a number of such steps, which transformers' loop makes of three calls:

    prepare_next_batch    receive   new requests, from the queue to the scheduler (`receive_requests`)
                          admit     `Selection.select` chooses those whose memory is free (Algorithm 1 of eLLM)
                          map       `ElasticPagedCache.can_store_request_tokens` puts pages under their blocks, and
                                    `SectorClient.begins` restores what is away; those left out wait: `PagePreemption`
    _generation_step      forward   `ElasticPagedCache.update` in each layer, then attention (`compute_step`)
    update_batch          note      new tokens, full blocks, and who has ended (`ElasticScheduler.finish_request`)

In stock a request that is taken as the loop is to end is dropped, a step without tokens is an error, and an error in a
step fails every request and ends the loop. With ballonet a step that found no memory for activations is undone by
computing its requests again, in smaller steps (offload/policy/progress.py); where a driver call failed, they fail.
Where no request can be scheduled the newest one gives up its blocks and is computed again later; one that has waited
alone for long enough fails, and so do those that need more memory than there is.

Note [In flight]
    With asynchronous batching a step is prepared before the tokens of the one before it are known: the device puts them
    in their places. A request that is computed again in such a step would get a token of its earlier computation. So
    first the tokens of the batch in flight are waited for and taken in; then none is in flight.

Note [Inputs of a step]
    Stock writes the inputs of a step on the current stream and computes on another, which does not wait for the first.
    Where the device is behind, the first kernels read indices of the step before: other tokens
    (`prepare_batch_tensors`). With asynchronous batching only the initial zeros are written there, which may come after
    the first inputs. So the stream that computes, or copies the inputs, waits.

Note [Preempted]
    A preempted request keeps its blocks, unless computing it again is faster than moving it. Its pages, except those
    that it shares with running requests, become host pages at the same addresses, so that tables of blocks stay valid:
    kernels could read them there, only slower (eLLM §4.3.2). While it waits it counts as decoding, so that the
    admission takes it before prompts, and only when all of its pages fit on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestStatus

from ...allocator.errors import DriverError
from ..device.shared import may_grow
from ..sampling.carried import SAMPLER, without_graphs
from .cache import ElasticPagedCache
from .scheduler import ElasticScheduler


def in_place_of(stock: Callable[..., Any], mine: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that is `mine(self, ..., stock=stock)`, without a call of its own, as it runs for each step."""
    made = FunctionType(mine.__code__, mine.__globals__, mine.__name__)
    made.__kwdefaults__ = {"stock": stock}
    return functools.update_wrapper(made, stock)


def prepare_step(processor: Any, *, stock: Callable[..., bool]) -> bool:
    """Stands for `prepare_next_batch`: where no request can go on, the newest one waits, and fails in the end."""
    while True:
        active, preemption = processor.scheduler.active_requests, processor.offloading_manager
        if isinstance(preemption, PagePreemption):
            if not active:
                processor.scheduler.block_new_requests = False  # stock waits for a request to end, and none may be left
            if processor.scheduler.waiting_requests:
                for state, why in [*preemption.scheduler.pop_late(), *preemption.pop_unservable()]:
                    _fail(processor, state, why)
        try:
            prepared = stock(processor)
        except RuntimeError as error:
            if not isinstance(preemption, PagePreemption) or "No requests can be scheduled" not in str(error):
                raise
            if _take_in(processor):
                continue
            state = next(reversed(active.values()), None)
            if state is not None and len(active) == 1 and not preemption.may_wait():
                _fail(processor, state, preemption.scheduler.why_no_memory(state))
                continue
            if state is not None:
                preemption.compute_again(state)
            if not active:
                return False  # the loop tries again soon: other models may free memory
        else:
            if isinstance(preemption, PagePreemption):
                preemption.scheduler.begins(prepared)
            return prepared


def receive_requests(processor: Any, *, stock: Callable[..., bool]) -> bool:
    """Stands for `_update_tp_group_state`, which takes new requests from the queue, and drops them where it finds that
    the loop is to end: they go back, so that they fail with the others."""
    if (queue := processor.input_queue) is None:
        return stock(processor)
    processor.input_queue = noted = _Noted(queue)
    try:
        ends = stock(processor)
    finally:
        processor.input_queue = queue
    for state in noted.taken if ends else ():
        queue.put(state)
    return ends


def compute_step(processor: Any, model: Any, *, stock: Callable[..., None]) -> None:
    """Stands for `_generation_step`: an OutOfMemoryError fails only a request for which smaller steps were tried in
    vain (offload/policy/progress.py), a DriverError those of the step, and the step waits for its inputs, see Note
    [Inputs of a step]."""
    inputs, pairs, preemption = processor.inputs_and_outputs, processor.use_async_batching, processor.offloading_manager
    batch = inputs.io_pairs[inputs.current_pair].host_io if pairs else inputs
    stream = inputs.h2d_stream if pairs else inputs.compute_stream
    if isinstance(stream, torch.cuda.Stream):
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        copies = isinstance(processor.cache, ElasticPagedCache) and bool(processor.cache.new_blocks)
        # a graph would not copy blocks to the host
        with without_graphs(processor.model_runner, varlen=True) if copies else nullcontext():
            if timed := isinstance(preemption, PagePreemption) and preemption.scheduler.timed:
                preemption.scheduler.times.begin(preemption.scheduler.next, inputs.compute_stream)
            stock(processor, model)
    except (torch.OutOfMemoryError, DriverError) as error:
        if not isinstance(preemption, PagePreemption):
            raise
        active, scheduler = processor.scheduler.active_requests, preemption.scheduler
        why: Exception | None = error
        requests = _forgotten(batch)
        failed = [request.state for request in requests]
        if isinstance(error, torch.OutOfMemoryError):
            why = scheduler.lose_step({request.state.request_id: request.query_length for request in requests}, error)
        forks = processor.scheduler._requests_to_fork
        forks[:] = [state for state in forks if all(state is not other for other in failed)]  # computed again first
        _take_in(processor)
        still = [state for state in failed if active.get(state.request_id) is state]
        for state in reversed(still):
            if why is None:
                preemption.compute_again(state)
            else:
                _fail(processor, state, why)
    else:
        if timed:
            preemption.scheduler.times.end(inputs.compute_stream)
        if isinstance(preemption, PagePreemption):
            scheduler = preemption.scheduler
            if not scheduler.progress.settled or scheduler.memory.extra_reserve:
                requests = batch.requests_in_batch
                preemption.give_tokens([one.state.request_id for one in requests if one.has_new_token])


def launch_forward(runner: Any, model: Any, batch_data: dict[str, Any], *, stock: Callable[..., None]) -> None:
    """Stands for `compute_batch`: a step without tokens computes nothing. Such is one of a prompt of which a single
    token is left, which each of its answers computes for itself; in stock it ends the loop. Where attention is by
    request, the model gets no masks (attention.py). In a loop with a sampler that launches it."""
    if batch_data["input_ids"].numel():
        if isinstance(runner.cache, ElasticPagedCache) and runner.cache.by_request is not None:
            batch_data = runner.cache.by_request.without_masks(batch_data, runner.cache.dtype)
        if (sampler := vars(runner).get(SAMPLER)) is None:
            stock(runner, model, batch_data)
        else:
            sampler.launch(stock, runner, model, batch_data)


def fail_request(processor: Any, error: Exception, state: Any, *, stock: Callable[..., None]) -> None:
    """Stands for `_handle_request_error`: the failure is recorded."""
    if isinstance(processor.offloading_manager, PagePreemption):
        processor.scheduler.recorder.ended(state, "failed")
    stock(processor, error, state)


class _Noted:
    """A queue of which it is known what was taken."""

    def __init__(self, queue: Any) -> None:
        self.taken: list[Any] = []
        self.empty = queue.empty  # which each step asks
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get_nowait(self) -> Any:
        """Takes the next one. queue.Empty."""
        self.taken.append(self._queue.get_nowait())
        return self.taken[-1]


def _take_in(processor: Any) -> bool:
    """Waits for the batch in flight and notes its tokens. Returns whether there was one. See Note [In flight]."""
    if not processor.use_async_batching:
        return False
    batch = processor.inputs_and_outputs
    batch.h2d_stream.synchronize()  # copies may still read the buffers that the host writes next
    batch.compute_stream.synchronize()
    batch.current_pair = 1 - batch.current_pair
    try:
        processor.update_batch()
        return bool(_forgotten(batch.io_pairs[batch.current_pair].host_io))
    finally:
        batch.current_pair = 1 - batch.current_pair


def _forgotten(batch: Any) -> list[Any]:
    """Takes the requests out of a batch, and returns them."""
    requests, batch.requests_in_batch = batch.requests_in_batch, []
    batch.req_id_to_new_token_position = {}
    return list(requests)


def _fail(processor: Any, state: Any, error: Exception) -> None:
    processor._handle_request_error(error, state)
    processor.scheduler.finish_request(state.request_id)


class PagePreemption(OffloadingManager):
    """An OffloadingManager without a pool of its own on the host."""

    cache: ElasticPagedCache
    scheduler: ElasticScheduler

    def _compute_num_cpu_sectors(self, cpu_offload_space_gib: float | None, safety_threshold: float) -> int:
        return 0

    def offload_requests(self) -> bool:
        """Drops unused blocks, then preempts the newest of the requests that lack pages until the others fit or one is
        left. Returns whether any memory was freed."""
        self.cache.pool.try_to_free_sectors()
        starved, active = self.scheduler.starved_requests, len(self.scheduler.active_requests)
        evicted = not self._fits(starved) and self.cache.evict_kept(self.scheduler.selection.needed(starved))
        gave = False
        leaving = self.scheduler.selection.leaving
        while starved and active > 1 and (starved[-1][0].request_id in leaving or not self._fits(starved)):
            state, _ = starved.pop()
            active -= 1
            gave = True
            self._preempt(state)
        self.scheduler.block_new_requests = self.scheduler.block_new_requests or gave
        return gave or evicted or self.scheduler.memory.buffer.open()

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Restores the KV of preempted requests in the batch, as far as there are device pages, unless they were
        admitted with it on the host."""
        for request in requests_in_batch:
            if request.state.is_cpu_offloaded:
                if request.state.request_id not in self.cache.on_host:
                    self.cache.request_pages.to_device(request.state.request_id)
                request.state.is_cpu_offloaded = False
                self.scheduler.next = replace(self.scheduler.next, away=self.cache.pages.client.read_displaced)

    def free_request_cpu_cache(self, state: Any) -> None:
        """Does nothing: the blocks are freed like any others."""
        state.is_cpu_offloaded = False

    def compute_again(self, state: Any) -> None:
        """Frees the request's blocks; it waits, and is computed again with all of its tokens."""
        again, slo = state.create_equivalent_initial_request(), self.scheduler.slos.asked(state.request_id)
        state._status = RequestStatus.FINISHED
        self.scheduler.leave(state.request_id)
        self.scheduler.slos.note(state.request_id, slo)
        self.scheduler.wait_again(again)

    def _fits(self, starved: list[Any]) -> bool:
        return self.scheduler.selection.needed(starved) <= self.scheduler.memory.now().usable

    def _preempt(self, state: Any) -> None:
        if self._moves(state) and self.cache.request_pages.to_host(state.request_id):
            self._keep_for_later(state)
        else:  # or the host is full
            self.compute_again(state)

    def _moves(self, state: Any) -> bool:
        """Is moving the request's KV to the host and back faster than computing it again? True where times are
        unknown."""
        page, parts = self.cache.pages.client.manager.link.page_seconds, self.cache.model.costs.parts
        if page is None or parts is None:
            return True
        again = parts.prefill(state.current_len(), self.cache.max_batch_tokens)
        return 2 * page * self.cache.request_pages.count(state.request_id) <= again

    def may_wait(self) -> bool:
        """May a lone request that finds no memory wait once more for other models or processes to free some?"""
        scheduler = self.scheduler
        return may_grow(self.cache.on) or (not scheduler.memory.without_reserve and scheduler.progress.wait())

    def pop_unservable(self) -> list[tuple[Any, Exception]]:
        """Takes requests out of the queue that have found too little memory for a while although no request runs.
        Returns them with the reason."""
        return [] if not self.scheduler.alone or self.may_wait() else self.scheduler.pop_unservable()

    def give_tokens(self, requests: Collection[str]) -> None:
        """Notes that a step gave each of these requests a token."""
        if requests and self.scheduler.progress.give(requests):
            self.scheduler.memory.relax_reserve()

    def _keep_for_later(self, state: Any) -> None:
        """Puts a preempted request back into the queue, as transformers does with one that it has copied to the host.
        The result of a batch in flight is lost, so it goes on from the last known token."""
        if state.status == RequestStatus.DECODING:
            if state.position_offset == len(state.initial_tokens) + len(state.generated_tokens):
                state.position_offset -= 1
                state.remaining_prefill_tokens = [(state.generated_tokens or state.initial_tokens)[-1]]
            else:
                state.remaining_prefill_tokens = state.tokens_to_process[:]
        state._status = RequestStatus.PENDING
        state.is_cpu_offloaded = True
        self.scheduler.active_requests.pop(state.request_id, None)
        self.scheduler.wait_again(state)
