"""What a model asks of a device, in pages: the sizes that its plan is worked out from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Device pages at one moment of a run, should nothing leave. `kv`: of each range of its cache, in the order in
    which layers compute; `movable`: those of them that may leave, as each has nothing but tokens that are there;
    `activations`: of what operators allocate, at the peak."""

    kv: tuple[int, ...]
    movable: int
    activations: int

    @property
    def pages(self) -> int:
        """All of them."""
        return sum(self.kv) + self.activations


@dataclass(frozen=True, slots=True)
class Needs:
    """Pages of one model. `layers`: of the weights of each decoder layer; `beside`: of all other weights; `working`:
    that `manage()` keeps free for a short use; `prompt`: when the prompt is computed, of which each sequence has so
    many `rows`; `last`: at the last token. Seconds, None where nobody knows, of iterations with every layer resident:
    `prefill` of the prompt, `decode` of the last token."""

    name: str
    layers: tuple[int, ...]
    beside: int
    working: int
    prompt: Moment
    last: Moment
    rows: int = 1
    prefill: float | None = None
    decode: float | None = None

    @property
    def weights(self) -> int:
        """Pages of all weights."""
        return sum(self.layers) + self.beside
