"""The models of one server and their generation loops: one of continuous batching each, all at the same time.

transformers' server keeps one loop, and stops it when a request for another model comes. Here the loops share the pages
of the device by the governor's ladder, so that none needs to stop.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.utils import CBGenerateManager, GenerationState

from ..batching.scheduler import ElasticScheduler


class Loop(CBGenerateManager):
    """The generation loop of one model. A request is refused before it waits, as HTTP errors: 400 where it has no
    tokens; 413 where it can never run, with the numbers; 429 where too many wait."""

    def __init__(self, settings: Any, most_waiting: int) -> None:
        """`settings`: a ContinuousBatchingConfig; `most_waiting`: requests that may wait."""
        super().__init__(settings)
        self._most_waiting = most_waiting

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers', or HTTPException."""
        self._admit(request_id, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """As transformers', or HTTPException; the request is cancelled where its client goes away."""
        self._admit(request_id, inputs, gen_config)
        try:
            found: tuple[str, int, list[int]] = await super().generate_non_streaming(
                model, processor, inputs, gen_config, request_id
            )
        except BaseException:
            if self._cb is not None:
                self._cb.cancel_request(request_id)
            raise
        return found

    @property
    def queued(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        loop = self._cb
        if loop is None or loop.batch_processor is None:
            return 0, 0
        scheduler = loop.batch_processor.scheduler
        return len(scheduler.active_requests), len(scheduler.waiting_requests) + loop.input_queue.qsize()

    @property
    def steps(self) -> int:
        """Batches so far."""
        return 0 if self._cb is None else int(getattr(self._cb, "current_batch", 0))

    def _admit(self, request: str, inputs: Any, options: Any) -> None:
        if not inputs["input_ids"]:
            raise HTTPException(400, "the prompt has no tokens")
        if self.queued[1] >= self._most_waiting:
            raise HTTPException(429, f"{self._most_waiting} requests wait already: try again later")
        loop = self._cb
        scheduler = None if loop is None or loop.batch_processor is None else loop.batch_processor.scheduler
        if isinstance(scheduler, ElasticScheduler):
            refusal = scheduler.refusal(request, len(inputs["input_ids"]), options.max_new_tokens or 0)
            if refusal is not None:
                raise HTTPException(413, str(refusal))


class Tenants(GenerationState):
    """As GenerationState, with a loop for each model."""

    def __init__(self, settings: Any, most_waiting: int) -> None:
        """As `Loop`."""
        super().__init__(continuous_batching=True, cb_config=settings)
        self._settings = settings
        self._most_waiting = most_waiting
        self.loops: dict[str, Loop] = {}  # by model, as "name@revision"

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The loop of a model."""
        if not use_cb:
            return super().get_manager(model_id)
        return self.loops.setdefault(model_id, Loop(self._settings, self._most_waiting))

    def shutdown(self) -> None:
        """Ends all loops; requests that run are told."""
        for loop in self.loops.values():
            loop.stop()
        self.loops.clear()

    def is_cb_alive(self) -> bool:
        """Do all loops run?"""
        return all(loop.is_alive() for loop in self.loops.values())
