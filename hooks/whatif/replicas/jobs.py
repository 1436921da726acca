"""One request that is simulated: how far it is, and the KV that it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...server.arrivals import RecordedArrival
from ...server.load import Answered


@dataclass(eq=False, slots=True)
class Job:
    """A request. `made`: tokens of its answer so far; `kv`: tokens whose KV is there or is being computed; `held`:
    tokens of memory that it has; `flying`: microbatches under way that it is in; `stalled`: its KV is on the way, and
    it is in no microbatch until that has come; `leaving`: it goes to another replica at the next boundary, or
    nowhere, as its client is gone; `over`: its client has all tokens, was told an error, or is gone."""

    number: int
    arrival: RecordedArrival
    answer: Answered = field(init=False)
    made: int = 0
    kv: int = 0
    held: int = 0
    flying: int = 0
    stalled: bool = False
    leaving: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        self.answer = Answered(self.arrival.at)

    @property
    def known(self) -> int:
        """Tokens that are known: the prompt, and those that were made. All but the last one have KV once it decodes."""
        return self.arrival.prompt + self.made

    @property
    def most(self) -> int:
        """Tokens of KV that it has at its end."""
        return self.arrival.prompt + max(1, self.arrival.new) - 1

    @property
    def ended(self) -> bool:
        """Whether all its tokens are made."""
        return self.made >= max(1, self.arrival.new)

    def token(self, now: float) -> None:
        """Another token is made."""
        self.made += 1
        self.answer.times.append(now)
        self.answer.tokens, self.answer.ended = self.made, now

    def forget(self) -> None:
        """All its KV is lost: it has to be computed anew, from all tokens that are known."""
        self.kv = 0

    def reset(self) -> None:
        """The group that it was in is no more, with all that it had there."""
        self.kv = self.held = self.flying = 0
        self.stalled = self.leaving = False
