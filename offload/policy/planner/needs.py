"""The pages that a model needs of a device, from which its plan is worked out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The phase of a model: the prompt, or an answer to it."""

    PROMPT = 0
    ANSWER = 1


@dataclass(frozen=True, slots=True)
class Moment:
    """Device pages at one moment of a run, should nothing leave. `kv`: of each range of its cache, in the order in
    which layers compute; `movable`: those of them that may leave, as they are full; `activations`: of what operators
    allocate, at the peak and at most; `fewest`: the same at least, None as many."""

    kv: tuple[int, ...]
    movable: int
    activations: int
    fewest: int | None = None

    @property
    def pages(self) -> int:
        """The most pages."""
        return sum(self.kv) + self.activations

    @property
    def least(self) -> int:
        """Pages of operators at least."""
        return self.activations if self.fewest is None else self.fewest


@dataclass(frozen=True, slots=True)
class Judged:
    """Seconds of iterations by which a run decides what leaves, None where not measured: of the least decode step that
    was, of the prompt, and of the last decode step."""

    first: float | None = None
    prefill: float | None = None
    decode: float | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """Pages of one model. `layers`: of the weights of each decoder layer; `beside`: of all other weights; `working`:
    that `manage()` keeps free for a short use; `prompt`: when the prompt is computed, of which each sequence has so
    many `rows`; `last`: at the last token. `stages`: the prompt, from one layer's append to the next one's; `growth`:
    the answer, from one new page to the next; a single moment each where not given. Seconds, None where not known, of
    iterations with every layer resident: `prefill` of the prompt, `decode` of the last token; `judged`: see Judged,
    None for these two; `aside`: that `generate()` takes beside the first forward, and beside each other."""

    name: str
    layers: tuple[int, ...]
    beside: int
    working: int
    prompt: Moment
    last: Moment
    rows: int
    prefill: float | None = None
    decode: float | None = None
    stages: tuple[Moment, ...] = ()
    growth: tuple[Moment, ...] = ()
    judged: Judged | None = None
    aside: tuple[float, float] = (0.0, 0.0)

    @property
    def weights(self) -> int:
        """Pages of all weights."""
        return sum(self.layers) + self.beside

    @property
    def judging(self) -> Judged:
        """The times that a run decides by."""
        return self.judged or Judged(self.decode, self.prefill, self.decode)

    def moments(self, phase: Phase) -> tuple[Moment, ...]:
        """The moments of that phase."""
        return self.stages or (self.prompt,) if phase is Phase.PROMPT else self.growth or (self.last,)
