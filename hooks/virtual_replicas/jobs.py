"""A simulated request: its progress, and its KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..server.load import Answered, RecordedArrival


@dataclass(eq=False, slots=True)
class Job:
    """A request. `made`: tokens of its answer so far; `kv`: tokens with KV, computed or in flight; `held`: tokens of
    its memory; `in_flight`: number of its microbatches in flight; `stalled`: in no microbatch until its KV has arrived;
    `leaving`: to be removed once in no microbatch, for another replica or as cancelled; `over`: its client has all
    tokens, got an error, or is gone."""

    number: int
    arrival: RecordedArrival
    answer: Answered = field(init=False)
    made: int = 0
    kv: int = 0
    held: int = 0
    in_flight: int = 0
    stalled: bool = False
    leaving: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        self.answer = Answered(self.arrival.at)

    @property
    def known(self) -> int:
        """Tokens of the prompt and the answer so far. All but the last one have KV once the request decodes."""
        return self.arrival.prompt + self.made

    @property
    def most(self) -> int:
        """Tokens of KV at the end of the request."""
        return self.arrival.prompt + max(1, self.arrival.new) - 1

    @property
    def ended(self) -> bool:
        """Whether all tokens are made."""
        return self.made >= max(1, self.arrival.new)

    def add_token(self, now: float) -> None:
        """Adds a token to the answer."""
        self.made += 1
        self.answer.times.append(now)
        self.answer.tokens, self.answer.ended = self.made, now

    def drop_kv(self) -> None:
        """Drops all KV, which has to be computed anew from all `known` tokens."""
        self.kv = 0

    def reset(self) -> None:
        """Drops all state of a group that has ended."""
        self.kv = self.held = self.in_flight = 0
        self.stalled = self.leaving = False
