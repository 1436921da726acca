"""The generation loops of a server's models: one of continuous batching each, all at the same time, and which requests
they refuse. Loops share the pages of the device by the reclaim order of the device, so that none needs to stop.

Note [Longer than the model]
    transformers goes on beyond the longest sequence of a model's configuration: rotary positions can be computed for
    any token, but answers get worse and worse. A server refuses instead, as the client may have meant another model.
    `generate_batch` stays as stock, except for models with a table of positions, where a step that reads behind the
    table's end would fail every request (`Batched.positions`).

Note [A loop that has died]
    An error that transformers' loop cannot place ends it, and its requests fail. The next request starts another one. A
    request is refused as well where the loop ended while it was handed over: nobody might tell it.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import RequestStatus

from ...allocator.errors import DriverError, ManageError, ModelInUse, PoolExhausted, SequenceTooLong
from ...offload.policy.step_costs import NOTHING, RequestSLO
from ..batching.patches import why_stock
from ..batching.scheduler import ElasticScheduler
from ..compat import longest_sequence
from ..managed import Managed, managed_as
from ..sampling.carried import SAMPLING, SampledRequest
from ..sampling.grammar import GrammarRefused, Grammars
from ..sampling.loop import LoopSampler
from ..sampling.settings import ChosenToken, Sampling
from .engine import Denial, Generation, Listener, Update, check_fits, check_name, check_waiting, tell
from .served import ends_of

_THE_REQUEST: Final = "the request"  # in messages to its client
_ENDING: Final = "the server shuts down"


class _Answers:
    """Stands for the OutputRouter of a loop: brings what its thread finds to those who wait for it. It is given whole
    errors, not their texts. `listeners`: by the names of requests that have not ended."""

    def __init__(self) -> None:
        self.listeners: dict[str, Listener] = {}
        self.ends = False  # does the server shut down?

    def deliver(self, output: Any) -> None:
        """Tells of the new tokens of one request."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: Iterable[Any]) -> None:
        """Tells of the new tokens of requests. The logprobs of transformers' GenerationOutputs are ChosenTokens."""
        known = [(listener, output) for output in outputs if (listener := self.listeners.get(output.request_id))]
        tell((listener, listener.update(output.logprobs, output.is_finished())) for listener, output in known)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        """Tells of the error that ends a request."""
        state.status, state.error = RequestStatus.FAILED, str(error)
        if (listener := self.listeners.get(state.request_id)) is not None:
            tell([(listener, Denial(503, _ENDING if self.ends else str(error) or repr(error), "unavailable"))])

    def drop(self, name: str) -> None:
        """Frees the name of a request that has ended."""
        self.listeners.pop(name, None)


class Loop:
    """The generation loop of one model: an Engine. It begins with the first request, and again after it has died."""

    def __init__(self, model: Any, tokenizer: Any, settings: Any, most_waiting: int) -> None:
        """`model`: a managed one; `tokenizer`: transformers' own of it; `settings`: a ContinuousBatchingConfig;
        `most_waiting`: requests that may wait."""
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._most_waiting = most_waiting
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._longest = longest_sequence(model.config)
        self._manager: Any = None  # whose output_router are _Answers
        self._steps = 0  # of loops that have died
        self._failed = False  # could the loop not be started again?
        self._ending = threading.Event()  # does the server shut down?
        self._starting = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, "ballonet-grammars")  # what compiles is short (rendering.py), but many

    async def generate(self, generation: Generation) -> AsyncGenerator[Update, None]:
        """Computes an answer, see Engine. Denial."""
        request = SampledRequest(generation.sampling)
        if (text := generation.sampling.grammar) is not None:
            try:
                matcher = asyncio.get_running_loop().run_in_executor(self._compiling, self._grammars.matcher, text)
                request.grammar = await matcher
            except GrammarRefused as error:
                raise Denial(400, str(error), "invalid_value", "response_format") from None
            generation = replace(generation, ends=tuple({*generation.ends, *self._grammars.ends}))
        listener = await self._begin(generation, request, generation.most)
        try:
            async for update in listener:
                yield update
        finally:
            _leave(listener)

    async def score(self, generation: Generation) -> tuple[ChosenToken, ...]:
        """Computes the logprobs of the tokens of a prompt, see Engine. Denial."""
        scored: dict[int, ChosenToken] = {}
        sampling = Sampling(logprobs=generation.sampling.logprobs or 0)
        listener = await self._begin(generation, SampledRequest(sampling, scored=scored), 0)
        try:
            async for _ in listener:
                pass
        finally:
            _leave(listener)
        first, *others = generation.prompt
        return ChosenToken(first), *(scored[position] for position, _ in enumerate(others, 1))

    def tell(self) -> None:
        """Ends the loop after its step, without waiting; its requests fail with an error."""
        self._ending.set()
        if (manager := self._manager) is not None:
            manager.output_router.ends = True
            rank = manager.distributed_helper.global_rank
            manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, rank)

    def close(self) -> None:
        """Ends the loop; its requests fail with an error."""
        self.tell()
        with self._starting:
            if (manager := self._manager) is not None:
                manager.stop(block=True, timeout=60, hard_stop=True)
                self._steps, self._manager = self.steps, None  # it has tensors

    def sleep(self, level: int, timeout: float | None) -> None:
        """Puts the model to sleep, see Engine. Denial."""
        with _denied():
            self._managed.sleep(level, timeout=timeout)

    def wake(self) -> None:
        """Wakes the model, see Engine. Denial."""
        with _denied():
            self._managed.wake()

    @property
    def asleep(self) -> int:
        """The level at which the model sleeps."""
        return self._managed.asleep

    @property
    def _managed(self) -> Managed:
        handle = managed_as(self._model)
        assert handle is not None  # for as long as it is served
        return handle

    @property
    def answers(self) -> bool:
        """Can a request be answered now?"""
        return not (self._ending.is_set() or self._failed)

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        return self.queued[1]

    @property
    def queued(self) -> tuple[int, int]:
        """Returns (running requests, waiting requests)."""
        manager, scheduler = self._manager, self._scheduler
        if manager is None or scheduler is None:
            return 0, 0
        return len(scheduler.active_requests), len(scheduler.waiting_requests) + manager.input_queue.qsize()

    @property
    def buffer(self) -> int:
        """Host bytes that KV of prompts may take now."""
        scheduler = self._scheduler
        return 0 if scheduler is None else scheduler.memory.buffer.size

    @property
    def steps(self) -> int:
        """Batches so far."""
        return self._steps + int(getattr(self._manager, "current_batch", 0))

    @property
    def _scheduler(self) -> ElasticScheduler | None:
        """The loop's scheduler; None where no loop runs."""
        processor = None if self._manager is None else self._manager.batch_processor
        return None if processor is None else processor.scheduler

    async def _begin(self, generation: Generation, request: SampledRequest, new: int) -> Listener:
        """Hands a request of so many new tokens over to the loop. Denial."""
        check_fits(generation, new, self._longest, self._vocabulary)
        if not _runs(self._manager):
            await asyncio.to_thread(self._start)
        manager, scheduler = self._manager, self._scheduler
        if scheduler is None:
            raise Denial(503, _ENDING, "unavailable")
        answers: _Answers = manager.output_router
        check_name(generation.name, answers.listeners)
        self._admit(scheduler, generation, max(new, 1))
        listener = answers.listeners[generation.name] = Listener(generation, manager)
        manager.add_request(
            list(generation.prompt),
            listener.name,
            max(new, 1),
            streaming=True,
            eos_token_id=list(generation.ends),
            **{SAMPLING: request},
        )
        if not _runs(manager):  # see Note [A loop that has died]
            answers.drop(listener.name)
            raise Denial(
                503, _ENDING if self._ending.is_set() else "the loop of batches ended: try again", "unavailable"
            )
        return listener

    def _admit(self, scheduler: ElasticScheduler, generation: Generation, new: int) -> None:
        """Refuses a request that cannot run, or not now. Notes its SLO. Denial."""
        name, prompt = generation.name, len(generation.prompt)
        check_waiting(self.waiting, self._most_waiting)
        refusal = scheduler.memory.refusal(_THE_REQUEST, prompt, new)
        if isinstance(refusal, SequenceTooLong):
            raise Denial(400, str(refusal), "context_length_exceeded")
        if refusal is not None:
            raise Denial(413, str(refusal), "request_too_large")
        if generation.ttft is not None or generation.tpot is not None:
            scheduler.slos.note(name, RequestSLO(generation.ttft, generation.tpot, scheduler.clock()))
            if (late := scheduler.slos.impossible(name, prompt, new)) is not None:
                scheduler.slos.note(name, NOTHING)
                raise Denial(422, _THE_REQUEST + str(late).removeprefix(f"request {name}"), "slo_not_kept")

    @functools.cached_property
    def _grammars(self) -> Grammars:
        ends = ends_of(self._model.generation_config, self._tokenizer)
        return Grammars(self._tokenizer, ends, self._vocabulary)

    def _start(self) -> None:
        """Starts the loop, so that its cache and its scheduler exist when this returns. Denial."""
        with self._starting:
            if self._ending.is_set():
                raise Denial(503, _ENDING, "unavailable")
            if _runs(self._manager):
                return
            if (dead := self._manager) is not None:
                self._steps += int(getattr(dead, "current_batch", 0))
                self._manager = None
                dead.stop(block=True)  # which waits for its thread: that notes its error last
                dead.background_thread_status.fatal_error = None  # whose frames have the cache
                del dead
            try:
                self._manager = self._started()
            except (torch.OutOfMemoryError, PoolExhausted, DriverError) as error:
                self._failed = True
                raise Denial(503, f"no memory for a cache: {error}", "unavailable") from None
            self._failed = False
            if self._ending.is_set():
                self.tell()

    def _started(self) -> Any:
        """Starts a loop. Nothing but its requests' settings decides how tokens are chosen."""
        if (why := why_stock()) is not None:
            raise Denial(503, f"this server cannot batch requests: {why}", "unavailable")
        neutral, answers = GenerationConfig(do_sample=False, eos_token_id=-1), _Answers()
        manager = self._model.init_continuous_batching(
            generation_config=neutral, continuous_batching_config=self._settings
        )
        manager.output_router = answers
        manager.batch_processor = processor = manager._create_batch_processor()  # as its warmup() does
        LoopSampler.attach(processor)
        processor.scheduler.cancelled = answers.drop
        manager.start()
        return manager


@contextmanager
def _denied() -> Iterator[None]:
    """A `with` block whose errors are the client's answer."""
    try:
        yield
    except (ManageError, torch.OutOfMemoryError) as error:
        raise Denial(409, str(error), "model_in_use" if isinstance(error, ModelInUse) else "no_room") from None


def _leave(listener: Listener) -> None:
    """Ends a request for which nobody waits any more."""
    if listener.is_over or not _runs(listener.source):
        listener.source.output_router.drop(listener.name)
    else:
        listener.source.cancel_request(listener.name)


def _runs(manager: Any) -> bool:
    return manager is not None and manager.background_thread_status.can_accept_new_requests() is None
