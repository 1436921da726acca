"""The port between a server's endpoints and what computes their answers: a loop of batches (tenants.py), or replicas
(hooks/replicas/frontend.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from ..sampling.settings import ChosenToken, Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """A request for tokens. `name`: of no other request that has not ended; `prompt`: token ids, at least one; `most`:
    tokens of the answer; `ends`: tokens that end it; `ttft`, `tpot`: its SLOs in seconds; None: none."""

    name: str
    prompt: tuple[int, ...]
    most: int
    sampling: Sampling
    ends: tuple[int, ...] = ()
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens of an answer. `ended`: why it has ended with these: a token of `Generation.ends`, which is among
    `tokens`, or the end of a grammar, or `Generation.most`; None: more will come."""

    tokens: tuple[ChosenToken, ...]
    ended: Literal["stop", "length"] | None = None


class Denial(Exception):  # a refusal is no fault of the server
    """What a request is answered instead of being computed, or computed further. `status`: of HTTP; `code`: OpenAI's
    name of the kind; `param`: the field it is about; `retry_after`: seconds after which trying again may help."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(status, message, code, param, retry_after)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after


class Engine(Protocol):
    """Computes the answers of one model. Used by the event loop's thread, which nothing here may hold up."""

    def generate(self, generation: Generation) -> AsyncGenerator[Update, None]:
        """Computes an answer. The request is cancelled when the generator is closed early. Denial: 400 where it is
        longer than the model's longest sequence (`context_length_exceeded`), or asks for what this engine cannot do
        (`unsupported_parameter`); 409 where a request of its name has not ended; 413 where it can never fit in memory,
        422 where its SLO cannot be kept, 429 where too many wait, 503 where nothing can be answered."""

    async def score(self, generation: Generation) -> tuple[ChosenToken, ...]:
        """Computes the logprobs of the tokens of a prompt, with `sampling.logprobs` likeliest ones each. Denial."""

    def tell(self) -> None:
        """Begins to end all requests, with Denial 503. Does not wait."""

    def close(self) -> None:
        """Ends all requests, with Denial 503, and waits until nothing runs any more."""

    @property
    def answers(self) -> bool:
        """Can a request be answered now? False once the loop behind this has died and cannot be started again."""

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
