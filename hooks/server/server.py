"""A server of several models on one pool: transformers' own application, with what it lacks around it.

transformers   the endpoints, chat templates, streams of tokens, loading of models
here           one loop per model (tenants.py), `/metrics`, refusals with numbers, keys, a shutdown that finishes
               what runs
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler

from ...allocator._native import Device
from ...allocator.config import parse_time
from ...allocator.errors import BallonetError, ConfigError, ManageError, PoolExhausted
from ..device import governors
from ..managed import Managed, managed
from ..options import ManageOptions
from ..profile import Grid
from .load import SLOS
from .metrics import Collector
from .tenants import Tenants, asked_slo

OPEN = ("/health", "/metrics")  # that need no key


@dataclass(frozen=True)
class Address:
    """Where a server listens, and who may ask. `key`: what clients send as `Authorization: Bearer KEY`; None: anybody.
    `waiting`: requests of a model that may wait; `grace`: seconds that requests may take to end at a shutdown."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    waiting: int = 1024
    grace: float = 30.0


class _Listening(uvicorn.Server):
    """As uvicorn's server, which at a shutdown tells those who still wait after `grace` seconds."""

    def __init__(self, config: uvicorn.Config, grace: float, tell: Callable[[], None]) -> None:
        super().__init__(config)
        self._grace = grace
        self._tell = tell

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        telling = asyncio.get_running_loop().call_later(self._grace, self._tell)
        await super().shutdown(sockets)
        telling.cancel()


class Server:
    """Models that are loaded and managed, and the application that serves them."""

    def __init__(
        self,
        names: Sequence[str],
        device: Device,
        options: ManageOptions,
        address: Address,
        say: Callable[[str], None],
        **batching: Any,
    ) -> None:
        """Loads the models. `say`: is called with each line for people; `batching`: what ContinuousBatchingConfig
        takes. ManageError where a model is not there or cannot be loaded, torch.OutOfMemoryError."""
        self._address = address
        self._say = say
        self.tenants = Tenants(ContinuousBatchingConfig(**batching), address.waiting)
        place = f"cuda:{device.ordinal}" if device.kind == "cuda" else "cpu"
        self._models = ModelManager(device=place, continuous_batching=True, model_timeout=-1)
        self._handles: dict[str, Managed] = {}
        self._names = {self._models.process_model_name(name) for name in names}
        grid = Grid(*governors.composed_with().tuning.serving.measured) if len(names) > 1 else None
        for name in names:
            self._load(name, options, grid)
        stores = lambda: {name: handle.prefixes for name, handle in tuple(self._handles.items())}  # noqa: E731
        self.app = self._application(Collector(device, self.tenants, stores))

    def run(self) -> None:
        """Serves until SIGINT or SIGTERM: no new requests then; those that run may end, or are told after a while."""
        told = governors.composed_with().tuning.serving.told
        config = uvicorn.Config(
            self.app,
            host=self._address.host,
            port=self._address.port,
            log_level="warning",
            timeout_graceful_shutdown=round(self._address.grace + told),
        )
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again after its own shutdown
        try:
            with suppress(KeyboardInterrupt):  # and this
                _Listening(config, self._address.grace, self.tenants.tell).run()
        finally:
            self.close()
            signal.signal(signal.SIGTERM, before)

    def close(self) -> None:
        """Ends the loops, and gives the models' memory back."""
        self.tenants.shutdown()
        while self._handles:
            self._handles.popitem()[1].release()
        self._models.shutdown()

    def _load(self, name: str, options: ManageOptions, grid: Grid | None) -> None:
        """`grid`: what is measured of it first, so that it is known what it can give while others are asked."""
        self._say(f"loading {name}")
        try:
            model, _ = self._models.load_model_and_processor(self._models.process_model_name(name))
        except (BallonetError, PoolExhausted):
            raise
        except Exception as error:  # whatever files and transformers' loading may raise
            raise ManageError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
        if not hasattr(model, "init_continuous_batching"):
            raise ManageError(f"{name} is a {type(model).__name__}, which transformers cannot batch continuously")
        self._handles[name] = managed(model, options, grid=grid)
        self._say(f"{name}: {self._handles[name]!r}")

    def _application(self, figures: Collector) -> FastAPI:
        models, tenants = self._models, self.tenants
        app: FastAPI = build_server(
            models,
            ChatCompletionHandler(models, tenants),
            completion_handler=CompletionHandler(models, tenants),
            response_handler=ResponseHandler(models, tenants),
            transcription_handler=TranscriptionHandler(models, tenants),
            systemone_handler=SystemOneHandler(model_manager=models, generation_state=tenants),
            generation_state=tenants,
        )
        stock = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(running: FastAPI) -> Any:
            async with stock(running) as state:
                at = f"http://{self._address.host}:{self._address.port}"
                self._say(f"ready: {', '.join(sorted(name.partition('@')[0] for name in self._names))} at {at}")
                yield state
                self._say("shutting down")

        app.router.lifespan_context = lifespan
        app.get("/metrics")(lambda: Response(figures.text(), media_type="text/plain; version=0.0.4"))
        app.middleware("http")(self._checked)
        app.exception_handler(HTTPException)(_refused)
        return app

    async def _checked(self, request: Request, go_on: Callable[[Request], Any]) -> Any:
        """Refuses who has no key, models that are not served, and SLOs that are none; notes those that are."""
        key = self._address.key
        if key is not None and request.url.path not in OPEN and request.headers.get("authorization") != f"Bearer {key}":
            return refusal(401, "an API key is needed: Authorization: Bearer KEY")
        if request.url.path in ("/load_model", "/reset"):
            return refusal(403, "this server serves the models that it was started with")
        if request.method == "POST" and "json" in request.headers.get("content-type", ""):
            try:
                body = json.loads(await request.body())
            except ValueError as error:
                return refusal(400, f"the body is no JSON: {error}")
            if not isinstance(body, dict):
                return refusal(400, "the body is not a JSON object")
            name = str(body.get("model"))
            if self._models.process_model_name(name) not in self._names:
                served = ", ".join(sorted(each.partition("@")[0] for each in self._names))
                return refusal(404, f"no model {name!r} here: {served}")
        try:
            given = [request.headers.get(name) for name in SLOS]
            ttft, tpot = (parse_time(text, name) if text else None for text, name in zip(given, SLOS, strict=True))
        except ConfigError as error:
            return refusal(400, str(error))
        asked_slo.set((ttft, tpot) if any(given) else None)
        return await go_on(request)


async def _refused(_: Request, error: HTTPException) -> JSONResponse:
    return refusal(error.status_code, str(error.detail))


def refusal(status: int, why: str) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": why, "type": "invalid_request_error", "code": status}}, status)
