"""What ballonet changes in the steps of a generation loop, so that no request is lost and the loop lives.

In stock a request that is taken as the loop is to end is dropped (`receiving`), a step without tokens is an error
(`launching`), and an error in a step fails every request and ends the loop. With ballonet a step that found no memory
for activations is undone by computing its requests again (preemption.py); where a driver call failed, they fail. Where
no request can be scheduled the newest one gives up its blocks and is computed again later; one that has waited alone
for long enough fails, and so do those that need more memory than there is.

Note [In flight]
    With asynchronous batching a step is prepared before the tokens of the one before it are known: the device puts them
    in their places. A request that is computed again in such a step would get a token of its earlier computation. So
    first the tokens of the batch in flight are waited for and taken in; then none is in flight.

Note [Inputs of a step]
    Stock writes the inputs of a step on the current stream and computes on another, which does not wait for the first.
    Where the device is behind, the first kernels read indices of the step before: other tokens
    (`prepare_batch_tensors`). With asynchronous batching only the initial zeros are written there, which may come after
    the first inputs. So the stream that computes, or copies the inputs, waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...allocator.errors import DriverError
from .cache import ElasticPagedCache
from .preemption import PagePreemption


class _Noted:
    """A queue of which it is known what was taken."""

    def __init__(self, queue: Any) -> None:
        self.taken: list[Any] = []
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get_nowait(self) -> Any:
        """Takes the next one. queue.Empty."""
        self.taken.append(self._queue.get_nowait())
        return self.taken[-1]


def receiving(stock: Callable[..., bool]) -> Callable[..., bool]:
    """Wraps `_update_tp_group_state`, which takes new requests from the queue, and drops them where it finds that the
    loop is to end: they go back, so that they fail with the others."""

    @functools.wraps(stock)
    def receive(self: Any) -> bool:
        if (queue := self.input_queue) is None:
            return stock(self)
        self.input_queue = noted = _Noted(queue)
        try:
            ends = stock(self)
        finally:
            self.input_queue = queue
        for each in noted.taken if ends else ():
            queue.put(each)
        return ends

    return receive


def computing(stock: Callable[..., None]) -> Callable[..., None]:
    """Wraps `_generation_step`: an OutOfMemoryError fails only a request that ran alone and for which nobody could free
    memory, a DriverError those of the step, and the step waits for its inputs, see Note [Inputs of a step]."""

    @functools.wraps(stock)
    def step(self: Any, model: Any) -> None:
        inputs = self.inputs_and_outputs
        stream = inputs.h2d_stream if self.use_async_batching else inputs.compute_stream
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            with _launched_one_by_one(self):
                stock(self, model)
        except (torch.OutOfMemoryError, DriverError) as error:
            preemption, active = self.offloading_manager, self.scheduler.active_requests
            if not isinstance(preemption, PagePreemption):
                raise
            alone = len(active) == 1
            batch, pairs = self.inputs_and_outputs, self.use_async_batching
            requests = _forgotten(batch.io_pairs[batch.current_pair].host_io if pairs else batch)
            failed = [each.state for each in requests]
            forks = self.scheduler._requests_to_fork
            forks[:] = [state for state in forks if all(state is not each for each in failed)]  # computed again first
            _take_in(self)
            still = [state for state in failed if active.get(state.request_id) is state]
            if isinstance(error, DriverError):
                for state in still:
                    _fail(self, state, error)
            elif not alone or (still and preemption.may_try_again(still[0].request_id)):
                preemption.begin_again(still)
            elif still:
                _fail(self, still[0], error)

    return step


def launching(stock: Callable[..., None]) -> Callable[..., None]:
    """Wraps `compute_batch`: a step without tokens computes nothing. Such is one of a prompt of which a single token is
    left, which each of its answers computes for itself; in stock it ends the loop. Where attention is by request, the
    model gets no masks (attention.py)."""

    @functools.wraps(stock)
    def launch(self: Any, model: Any, batch_data: dict[str, Any]) -> None:
        if batch_data["input_ids"].numel():
            if isinstance(self.cache, ElasticPagedCache) and self.cache.by_request is not None:
                batch_data = self.cache.by_request.without_masks(batch_data, self.cache.dtype)
            stock(self, model, batch_data)

    return launch


def preparing(stock: Callable[..., bool]) -> Callable[..., bool]:
    """Wraps `prepare_next_batch`: where no request can go on, the newest one waits, and fails in the end."""

    @functools.wraps(stock)
    def prepare(self: Any) -> bool:
        while True:
            active, preemption = self.scheduler.active_requests, self.offloading_manager
            if isinstance(preemption, PagePreemption):
                if not active:
                    self.scheduler.block_new_requests = False  # stock waits for a request to end, and none may be left
                for state, why in [*preemption.scheduler.late(), *preemption.hopeless()]:
                    _fail(self, state, why)
            try:
                found = stock(self)
            except RuntimeError as error:
                if not isinstance(preemption, PagePreemption) or "No requests can be scheduled" not in str(error):
                    raise
                if _take_in(self):
                    continue
                state = next(reversed(active.values()), None)
                if state is not None and len(active) == 1 and not preemption.may_wait():
                    _fail(self, state, preemption.scheduler.why_not(state))
                    continue
                if state is not None:
                    preemption.compute_again(state)
                if not active:
                    return False  # the loop tries again soon: other models may free memory
            else:
                if isinstance(preemption, PagePreemption):
                    preemption.scheduler.begins(found)
                    if found:
                        preemption.scheduled()
                return found

    return prepare


def telling(stock: Callable[..., None]) -> Callable[..., None]:
    """Wraps `_handle_request_error`, which keeps only the text of an error: the server gets the error itself, and the
    failure is recorded."""

    @functools.wraps(stock)
    def handle(self: Any, error: Exception, state: Any) -> None:
        if isinstance(self.offloading_manager, PagePreemption):
            self.scheduler.failed(state)
            if state.request_id in self.scheduler.reasons:
                self.scheduler.reasons[state.request_id] = error
        stock(self, error, state)

    return handle


@contextmanager
def _launched_one_by_one(processor: Any) -> Iterator[None]:
    """A `with` block in which no graph is replayed or captured if the batch has blocks that are copied to the host: a
    graph would not copy them."""
    runner, cache = processor.model_runner, processor.cache
    graphs = runner.use_cuda_graph_varlen
    if isinstance(cache, ElasticPagedCache) and cache.new_blocks:
        runner.use_cuda_graph_varlen = False
    try:
        yield
    finally:
        runner.use_cuda_graph_varlen = graphs


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
