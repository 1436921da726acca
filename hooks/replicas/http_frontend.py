"""Stands in for the model and the generation loop in transformers' server: sends requests to the supervisor."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import HTTPException
from transformers.cli.serving.utils import CBGenerateManager, GenerationState
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ...allocator.errors import ManageError, SLOError
from ..server import tenants
from ..server.loading import Models, parts_of
from ..server.tenants import asked_seed, asked_slo, check_ended
from .microbatch_plan import Request, Sampling

_SLO = SLOError.__name__  # begin of a replica's error message where an SLO cannot be kept
_options: ContextVar[Any] = ContextVar("options")  # the GenerationConfig of the request that is handled


class RequestSink(Protocol):
    """The supervisor's methods for clients. Thread-safe."""

    def submit(self, request: Request) -> str | None:
        """Takes a request. Returns why it is refused; None: it is taken."""

    def cancel(self, name: str) -> None:
        """Cancels a request whose client has gone away."""

    def end_requests(self) -> None:
        """Begins to end all requests, and notifies their clients. Does not wait."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their first token."""


@dataclass(slots=True)
class _Status:
    """Stands in for transformers' BackgroundThreadStatus: no fatal error."""

    fatal_error: str | None = None


class FrontendManager:
    """Stands in for the ContinuousBatchingManager of one model. `deliver` is called on the supervisor's thread, all
    else on the event loop's."""

    def __init__(self, supervisor: RequestSink) -> None:
        self.background_thread_status = _Status()
        self._supervisor = supervisor
        self._handlers: dict[str, tuple[Callable[[Any], None], asyncio.AbstractEventLoop]] = {}
        self._early: dict[str, GenerationOutput | None] = {}  # outputs of requests without a handler so far
        self._whole: set[str] = set()  # requests whose clients want the whole answer at once
        self._lock = threading.Lock()

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        eos_token_id: int | list[int] | None = None,
        **_: Any,
    ) -> str:
        """Sends a request to the supervisor, and returns its name. HTTPException where the supervisor refuses it."""
        name = request_id or f"request-{secrets.token_hex(8)}"
        ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
        ttft, tpot = asked_slo.get() or (None, None)
        sampling, prompt = sampling_of(_options.get()), tuple(input_ids)
        request = Request(name, prompt, max_new_tokens or 1, sampling, tuple(ends), ttft=ttft, tpot=tpot)
        with self._lock:
            if name not in self._handlers:
                self._early[name] = None
            if not streaming:
                self._whole.add(name)
        if (why := self._supervisor.submit(request)) is not None:
            self._forget(name)
            raise HTTPException(413, why)
        return name

    def has(self, name: str) -> bool:
        """Returns whether a request of this name has not ended."""
        with self._lock:
            return name in self._handlers or name in self._early

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Has `callback` called on the running event loop with a GenerationOutput for each token."""
        with self._lock:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            early = self._early.pop(request_id, None)
        if early is not None:
            self._deliver(early)

    def cancel_request(self, request_id: str) -> None:
        """Cancels a request; its callback is not called any more."""
        self._forget(request_id)
        self._supervisor.cancel(request_id)

    def deliver(self, request: Request, error: str | None = None) -> None:
        """Passes a request's new tokens, or the error that ends it, to its callback."""
        over = request.over or error is not None
        if not over and request.name in self._whole:
            return
        status = RequestStatus.FAILED if error else RequestStatus.FINISHED if over else RequestStatus.DECODING
        self._deliver(
            GenerationOutput(request.name, list(request.prompt), list(request.delivered), error=error, status=status)
        )

    def _deliver(self, output: GenerationOutput) -> None:
        name = output.request_id
        with self._lock:
            if name in self._early:
                self._early[name] = output  # has all tokens of the earlier ones
                return
            handler = self._handlers.get(name)
            if output.is_finished():
                self._handlers.pop(name, None)
                self._whole.discard(name)
        if handler is not None:
            with suppress(RuntimeError):  # its event loop is closed: no client waits for it
                handler[1].call_soon_threadsafe(handler[0], output)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._handlers.pop(name, None)
            self._early.pop(name, None)
            self._whole.discard(name)

    def stop(self, *_: Any, **__: Any) -> None:
        """Ends all requests, without waiting; their clients are notified."""
        self._supervisor.end_requests()


def sampling_of(options: Any) -> Sampling:
    """Returns the sampling that a GenerationConfig and the `seed` of the present request ask for."""
    seed = asked_seed.get()
    seed = secrets.randbits(31) if seed is None else seed
    if not options.do_sample:
        return Sampling(seed)
    temperature = 1.0 if options.temperature is None else options.temperature
    return Sampling(seed, temperature, options.top_k or 0, 1.0 if options.top_p is None else options.top_p)


class FrontendLoop(CBGenerateManager):
    """Generation by replicas. HTTP 429 where too many requests wait, 400 for a prompt without tokens, 409 where another
    request of its x-request-id has not ended, 413 where it can never run, or is longer than the model's context, 422
    where a replica cannot keep its SLO, with the nearest that it can."""

    def __init__(self, front: FrontendManager, supervisor: RequestSink, most_waiting: int) -> None:
        super().__init__()
        self._cb: Any = front
        self._supervisor = supervisor
        self._most_waiting = most_waiting

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Keeps the options of the present request, as each may have its own."""
        _options.set(gen_config)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Streams an answer, as transformers does. HTTPException."""
        self._admit(request_id, model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Returns an answer, as transformers does. HTTPException. Cancels the request where its client goes away."""
        self._admit(request_id, model, inputs, gen_config)
        try:
            answer: tuple[str, int, list[int]] = await super().generate_non_streaming(
                model, processor, inputs, gen_config, request_id
            )
        except RuntimeError as error:
            raise HTTPException(422 if str(error).startswith(_SLO) else 503, str(error)) from None
        except BaseException:
            self._cb.cancel_request(request_id)
            raise
        return answer

    def _admit(self, request: str, model: Any, inputs: Any, options: Any) -> None:
        if not inputs["input_ids"]:
            raise HTTPException(400, "the prompt has no tokens")
        check_ended(request, self._cb.has)
        tenants.fit(request, model, len(inputs["input_ids"]), options)
        if self._supervisor.waiting >= self._most_waiting:
            raise HTTPException(429, f"{self._most_waiting} requests wait already: try again later")


class FrontendState(GenerationState):
    """Stands in for transformers' GenerationState: all handlers use one loop."""

    def __init__(self, loop: FrontendLoop, front: FrontendManager) -> None:
        super().__init__(continuous_batching=True)
        self._loop = loop
        self._front = front

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """Returns the loop, for any model id."""
        return self._loop

    def tell(self) -> None:
        """Ends all requests, without waiting; their clients are notified."""
        self._front.stop()

    def shutdown(self) -> None:
        """Ends all requests, without waiting; their clients are notified."""
        self._front.stop()


class ShapeOnly(Models):
    """Loads a model's configuration and tokenizer, and the model without weights, which the replicas have."""

    def _load_model(self, model_id_and_revision: str, *_: Any, **__: Any) -> Any:
        """Returns the model on torch's meta device. ManageError."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        name, revision = parts_of(model_id_and_revision)
        try:
            config = AutoConfig.from_pretrained(name, revision=revision)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise ManageError(f"{name} cannot be served: {error}") from None
        model.name_or_path = name
        with suppress(OSError):  # it has none: the one from its configuration stays
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        return model
