"""The endpoints by which models of a server sleep and wake, with the names that vLLM has for them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct
from starlette.responses import Response

from ...allocator.config import parse_time
from ...allocator.errors import ConfigError
from .engine import Denial
from .http import HTTPCall, answered
from .served import Models, ServedModel

SLEEP: Final = {  # parameter of /sleep in the query -> what it says
    "level": "1: all goes to the host; 2: what the weights' file has is read from there again",
    "model": "the only model to sleep (default: all)",
    "timeout": "time to wait for requests that run, such as 30s",
}
WAKE: Final = {"model": "the only model to wake (default: all)"}


class Sleeping(Struct, frozen=True):
    """The answer of these endpoints. `is_sleeping`: do all models sleep? `levels`: of each model, 0 while awake."""

    is_sleeping: bool
    levels: dict[str, int]


class Sleeper:
    """Puts models of a server to sleep, and wakes them, while requests for others go on."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def sleep(self, call: HTTPCall) -> Response:
        """Answers once the models sleep; the first one that cannot ends it. Denial."""
        _check_known(call.parameters, SLEEP)
        level, timeout = call.parameters.get("level", "1"), call.parameters.get("timeout")
        if level not in ("1", "2"):
            raise Denial(400, f"level is {level!r}: give 1 or 2", "invalid_value", "level")
        try:
            seconds = None if timeout is None else parse_time(timeout, "timeout")
        except ConfigError as error:
            raise Denial(400, str(error), "invalid_value", "timeout") from None
        for model in self._chosen(call):
            await asyncio.to_thread(model.engine.sleep, int(level), seconds)
        return await self.look(call)

    async def wake(self, call: HTTPCall) -> Response:
        """Answers once the models are awake. Denial."""
        _check_known(call.parameters, WAKE)
        for model in self._chosen(call):
            await asyncio.to_thread(model.engine.wake)
        return await self.look(call)

    async def look(self, _: HTTPCall) -> Response:
        """Answers which models sleep."""
        levels = {model.name: model.engine.asleep for model in self._models}
        return answered(Sleeping(all(levels.values()), levels))

    def _chosen(self, call: HTTPCall) -> list[ServedModel]:
        name = call.parameters.get("model")
        return [*self._models] if name is None else [self._models.get(name)]


def _check_known(given: Mapping[str, str], known: Collection[str]) -> None:
    """Raises Denial 400 for a parameter that there is not."""
    if unknown := sorted(given.keys() - known):
        raise Denial(400, f"there is no parameter {unknown[0]!r} here: {', '.join(known)}", "invalid_value", unknown[0])
