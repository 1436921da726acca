"""The generation loops of a server's models: one of continuous batching each, all at the same time, and which requests
they refuse.

transformers' server keeps one loop, and stops it when a request for another model comes. ballonet's loops share the
pages of the device by the governor's ladder, so that none needs to stop.

Note [Longer than the model]
    transformers goes on beyond the longest sequence of a model's configuration: rotary positions can be computed for
    any token, but answers get worse and worse. A server refuses instead, as the client may have meant another model.
    `generate_batch` stays as stock, except for models with a table of positions, where a step that reads behind the
    table's end would fail every request (`Batched.positions`).

Note [One name, two requests]
    Clients choose the name of a request as `x-request-id`, by which answers are sent to them. Of two requests with one
    name the later would get the answers of both, and the earlier none. It happens: a proxy repeats a request with the
    same name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from fastapi import HTTPException
from transformers.cli.serving.utils import CBGenerateManager, GenerationState
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from ...allocator.errors import DriverError, PoolExhausted, RequestTooLarge, SequenceTooLong, SLOError
from ...offload.policy.step_costs import NOTHING, RequestSLO
from ..batching.scheduler import ElasticScheduler
from ..compat import longest_sequence

# does the present request leave open how long its answer may be?
is_open: ContextVar[bool] = ContextVar("is_open", default=False)
# errors of load, not of the server: a request waited too long, or had no memory. Another time it may be answered
_LATER = (SLOError, RequestTooLarge, torch.OutOfMemoryError, PoolExhausted, DriverError)
# the present request's SLOs: seconds to its first token, and of a decode step
asked_slo: ContextVar[tuple[float | None, float | None] | None] = ContextVar("asked_slo", default=None)
asked_seed: ContextVar[int | None] = ContextVar("asked_seed", default=None)  # the present request's seed


def fit(request: str, model: Any, prompt: int, options: Any) -> None:
    """Checks that `prompt` tokens and new ones fit into the model's longest sequence, if its configuration has one, and
    ends an answer of open length there. `options`: the GenerationConfig. HTTPException."""
    longest, new = longest_sequence(model.config), options.max_new_tokens or 0
    if not longest or prompt + new <= longest:
        return
    if is_open.get() and prompt < longest:
        options.max_new_tokens = longest - prompt
        return
    raise HTTPException(413, str(SequenceTooLong(request, prompt, new, longest)))


def check_ended(name: str, runs: Callable[[str], bool]) -> None:
    """Refuses a request with the name of another that has not ended, see Note [One name, two requests]. `runs(name)`:
    does one of that name run? HTTPException 409."""
    if runs(name):
        raise HTTPException(409, f"a request with the x-request-id {name!r} has not ended: give another one")


class Loop(CBGenerateManager):
    """The generation loop of one model. Requests are refused before they wait, as HTTP errors: 400 without tokens; 409
    where another of its x-request-id has not ended; 413 where it can never run, or is longer than the model, with the
    numbers; 422 where its SLO cannot be kept, with the nearest possible one; 429 where too many wait."""

    def __init__(self, settings: Any, most_waiting: int) -> None:
        """`settings`: a ContinuousBatchingConfig; `most_waiting`: requests that may wait."""
        super().__init__(settings)
        self._most_waiting = most_waiting
        self._ends = False  # is the server shutting down?

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Starts the loop at the first request, or again after an error, so that its cache and its scheduler exist when
        this returns. HTTPException."""
        if self._cb is not None and self.is_alive():
            return
        self._cb = None
        loop = model.init_continuous_batching(generation_config=gen_config, continuous_batching_config=self._cb_config)
        try:
            loop.batch_processor = loop._create_batch_processor()  # as its warmup() does
        except (torch.OutOfMemoryError, DriverError) as error:
            raise HTTPException(503, f"no memory for a cache: {error}") from None
        if isinstance(scheduler := loop.batch_processor.scheduler, ElasticScheduler):
            scheduler.cancelled = functools.partial(_forget, loop.output_router)
        loop.start()
        self._cb = loop

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Generates as transformers does, or raises HTTPException. Transformers registers the handler of tokens once
        the request has begun: one before it passes on what comes meanwhile, or a short answer would never end."""
        self._admit(request_id, model, inputs, gen_config)
        if (loop := self._cb) is not None:
            loop.register_result_handler(request_id, functools.partial(_pass_on, loop.output_router))
        try:
            return super().generate_streaming(model, processor, inputs, gen_config, request_id, *args, **kwargs)
        except BaseException:
            if loop is not None:
                _forget(loop.output_router, request_id)
            self._release(request_id)
            raise

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Generates as transformers does, or raises HTTPException; cancels the request when its client disconnects."""
        self._admit(request_id, model, inputs, gen_config)
        self._reasons[request_id] = None
        try:
            answer: tuple[str, int, list[int]] = await super().generate_non_streaming(
                model, processor, inputs, gen_config, request_id
            )
        except RuntimeError:  # it has ended, or never begun: a cancellation would be of the next one of its name
            if self._cb is not None:
                _forget(self._cb.output_router, request_id)
            why = self._leave(request_id)
            if self._ends:
                raise HTTPException(503, "the server shuts down") from None
            if isinstance(why, _LATER):
                raise HTTPException(503, str(why)) from None
            raise
        except BaseException:
            if self._cb is not None and request_id in self._cb.output_router.result_handlers:
                self._cb.cancel_request(request_id)
            self._leave(request_id)
            raise
        self._reasons.pop(request_id, None)
        return answer

    def tell(self) -> None:
        """Ends the loop after its step, without waiting; its requests fail with an error."""
        self._ends = True
        if self._cb is not None:
            rank = self._cb.distributed_helper.global_rank
            self._cb.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, rank)

    def stop(self) -> None:
        """Ends the loop; its requests fail with an error."""
        self._ends = True
        if self._cb is not None:
            self._cb.stop(block=True, timeout=60, hard_stop=True)

    @property
    def queued(self) -> tuple[int, int]:
        """Returns (running requests, waiting requests)."""
        loop, scheduler = self._cb, self._scheduler
        if loop is None or scheduler is None:
            return 0, 0
        return len(scheduler.active_requests), len(scheduler.waiting_requests) + loop.input_queue.qsize()

    @property
    def buffer(self) -> int:
        """Host bytes that KV of prompts may take now."""
        scheduler = self._scheduler
        return scheduler.memory.buffer.size if isinstance(scheduler, ElasticScheduler) else 0

    @property
    def steps(self) -> int:
        """Batches so far."""
        return 0 if self._cb is None else int(getattr(self._cb, "current_batch", 0))

    @property
    def _scheduler(self) -> Any:
        """The loop's scheduler; None before it has begun."""
        processor = None if self._cb is None else self._cb.batch_processor
        return None if processor is None else processor.scheduler

    def _admit(self, request: str, model: Any, inputs: Any, options: Any) -> None:
        if not inputs["input_ids"]:
            raise HTTPException(400, "the prompt has no tokens")
        check_ended(request, self._has)
        if self.queued[1] >= self._most_waiting:
            raise HTTPException(429, f"{self._most_waiting} requests wait already: try again later")
        fit(request, model, len(inputs["input_ids"]), options)
        scheduler = self._scheduler
        if isinstance(scheduler, ElasticScheduler):
            refusal = scheduler.memory.refusal(request, len(inputs["input_ids"]), options.max_new_tokens or 0)
            if refusal is not None:
                raise HTTPException(413, str(refusal))
            if (slo := asked_slo.get()) is not None:
                scheduler.slos.note(request, RequestSLO(*slo, scheduler.clock()))
                late = scheduler.slos.impossible(request, len(inputs["input_ids"]), options.max_new_tokens or 0)
                if late is not None:
                    scheduler.slos.note(request, NOTHING)
                    raise HTTPException(422, str(late))

    def _has(self, request: str) -> bool:
        """Has a request of this name not ended? A cancelled one ends when the loop has noticed it."""
        loop = self._cb
        if loop is None or not isinstance(self._scheduler, ElasticScheduler):
            return False
        return request in loop.output_router.result_handlers

    @property
    def _reasons(self) -> dict[str, Exception | None]:
        """Why requests failed whose clients wait, by request."""
        scheduler = self._scheduler
        return scheduler.reasons if isinstance(scheduler, ElasticScheduler) else {}

    def _leave(self, request: str) -> Exception | None:
        """Forgets a request whose client waits no more. Returns why it failed, if it did."""
        self._release(request)
        return self._reasons.pop(request, None)

    def _release(self, request: str) -> None:
        """Forgets the SLO of a request that may never reach the loop."""
        if isinstance(scheduler := self._scheduler, ElasticScheduler):
            scheduler.slos.note(request, NOTHING)


def _forget(router: Any, request: str) -> None:
    """Makes an OutputRouter deliver nothing more of a request."""
    with router._lock:
        router.result_handlers.pop(request, None)


def _pass_on(router: Any, output: Any) -> None:
    """Calls the handler that a request has by now, on its event loop. Then that handler is not this one."""
    with router._lock:
        handler, _ = router.result_handlers.get(output.request_id, (None, None))
    if handler is not None:
        handler(output)


class Tenants(GenerationState):
    """A GenerationState with a loop for each model."""

    def __init__(self, settings: Any, most_waiting: int) -> None:
        """Takes the arguments of `Loop`."""
        super().__init__(continuous_batching=True, cb_config=settings)
        self._settings = settings
        self._most_waiting = most_waiting
        self.loops: dict[str, Loop] = {}  # by model, as "name@revision"

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """Returns the loop of a model."""
        if not use_cb:
            return super().get_manager(model_id)
        return self.loops.setdefault(model_id, Loop(self._settings, self._most_waiting))

    def tell(self) -> None:
        """Ends all loops after their steps, without waiting; their requests fail with an error."""
        for loop in self.loops.values():
            loop.tell()

    def shutdown(self) -> None:
        """Ends all loops; their requests fail with an error."""
        for loop in self.loops.values():
            loop.stop()
        self.loops.clear()

    def is_cb_alive(self) -> bool:
        """Do all loops run?"""
        return all(loop.is_alive() for loop in self.loops.values())
