"""Pages of a model at the moments that a plan is made of: the prompt, and the last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...allocator.errors import ConfigError
from ...offload.policy.geometry import Geometry
from ...offload.policy.layout import place
from ...offload.policy.planner.changes import Question
from ...offload.policy.planner.needs import Judged, Moment, Needs
from ..compat import one_shape
from ..device import governors
from ..kv.grouping import CacheSizes, geometry_for
from ..programs.model_info import Widths
from ..weights.capacity import working_pages
from ..weights.model_parts import decoder_layers
from .forward import ModelShape, SeenForward, seen

_INDEX = 8  # bytes of a token's number


@dataclass(frozen=True, slots=True)
class Spread:
    """A range: its geometry, and the numbers of the `first` and the `last` layer in it, in the order of appending."""

    geometry: Geometry
    first: int
    last: int

    def pages(self, tokens: int) -> int:
        """Returns the pages under so many tokens of each sequence."""
        return self.geometry.parts * self.geometry.pieces(tokens)

    def full(self, tokens: int) -> int:
        """Returns the pages among these that are full."""
        return self.geometry.parts * self.geometry.full(tokens)

    def takes(self, after: int, until: int) -> Iterator[int]:
        """Yields the lengths after `after`, up to `until`, at which one more page is taken."""
        page, token = self.geometry.page, self.geometry.token_bytes
        for piece in range(self.geometry.pieces(after), self.geometry.pieces(until)):
            yield piece * page // token + 1


@dataclass(frozen=True, slots=True)
class Sizing:
    """Computes the needs of one model. `page`: bytes."""

    shape: ModelShape
    page: int

    def seen(self, batch: int, prompt: int, context: int) -> tuple[SeenForward, SeenForward]:
        """Runs the model without values, see `forward.seen`."""
        return seen(self.shape, batch, prompt, context, governors.composed_with().tuning.planning.alike)

    def saved(self, bits: int | None) -> int:
        """Returns the bytes of weights that quantization to so many bits saves."""
        before, after = (sum(block.nbytes for block in self.shape.blocks(how)) for how in (None, bits))
        return before - after

    def needs(
        self,
        name: str,
        asked: Question,
        seconds: tuple[float | None, float | None],
        judged: Judged | None = None,
        aside: tuple[float, float] = (0.0, 0.0),
    ) -> Needs:
        """Returns the model's pages. `seconds`: of a prefill and of a decode step; `judged`, `aside`: see Needs.
        ConfigError."""
        shape, tuning = self.shape, governors.composed_with().tuning.weights
        layout = place(shape.blocks(asked.bits), self.page, tuning.large)
        layers = layout.layer_pages(shape.layers)
        working = working_pages(shape.model, decoder_layers(shape.model), self.page, tuning)
        first, last = self.seen(asked.batch, asked.prompt, asked.context)
        ranges = list(self._spread(asked))
        return Needs(
            name,
            layers,
            layout.pages - sum(layers),
            layout.spare(sources=False, working=working),
            self._moment(ranges, asked.prompt, asked.batch, first.peak),
            self._moment(ranges, asked.context, asked.batch, last.peak),
            asked.prompt,
            *seconds,
            tuple(self._stages(ranges, asked, first)),
            tuple(self._growth(ranges, asked, last)),
            judged,
            aside,
        )

    def _stages(self, ranges: Sequence[Spread], asked: Question, forward: SeenForward) -> Iterator[Moment]:
        """Yields the moments of the prompt: after each layer's append, the pages, and which of them may leave."""
        for stage, peak in enumerate(forward.stages):
            opened = [range_ for range_ in ranges if range_.first < stage]
            full = sum(range_.full(asked.prompt) for range_ in opened if range_.last < stage)
            yield replace(self._moment(opened, asked.prompt, asked.batch, peak), movable=full)

    def _growth(self, ranges: Sequence[Spread], asked: Question, forward: SeenForward) -> Iterator[Moment]:
        """Yields the moments of the answer, at each token that takes a page."""
        ends = {tokens for range_ in ranges for tokens in range_.takes(asked.prompt, asked.context)}
        for tokens in sorted({*ends, asked.context}):
            moment = self._moment(ranges, tokens, asked.batch, forward.peak)
            yield replace(moment, movable=sum(range_.full(tokens - 1) for range_ in ranges))

    def _moment(self, ranges: Sequence[Spread], tokens: int, batch: int, peak: int) -> Moment:
        """Makes the moment with so many tokens, while operators use `peak` bytes."""
        tuning = governors.composed_with().tuning
        prompts = 2 * (2 * batch * tokens * _INDEX)  # `generate()` appends to the tokens and their mask by a copy
        most = -(-(int(peak * tuning.planning.unseen) + prompts) // self.page) + tuning.weights.small_blocks
        kv = tuple(range_.pages(tokens) for range_ in ranges)
        return Moment(kv, sum(range_.full(tokens) for range_ in ranges), most, -(-peak // self.page))

    def _spread(self, asked: Question) -> Iterator[Spread]:
        """Yields the ranges of the cache in the order in which layers append, each with its layers: the first layer
        that finds no place in one makes the next (grouping.py)."""
        geometries = dict(self._geometries(asked))
        places: dict[Widths, list[int]] = {}
        for turn, (_, widths) in enumerate(sorted(self.shape.widths.items())):
            places.setdefault(widths, []).append(turn)
        spreads = [
            Spread(geometry, turns[at], turns[min(at + geometry.layers, len(turns)) - 1])
            for widths, turns in places.items()
            for geometry in (geometries[widths],)
            for at in range(0, len(turns), geometry.layers)
        ]
        yield from sorted(spreads, key=lambda spread: spread.first)

    def _geometries(self, asked: Question) -> Iterator[tuple[Widths, Geometry]]:
        shape = self.shape
        together = len(shape.widths) if one_shape(shape.config) else 1
        for widths in dict.fromkeys(shape.widths.values()):
            sizes = CacheSizes(asked.batch, *widths, shape.dtype.itemsize)
            geometry = geometry_for(
                sizes,
                together,
                asked.prompt,
                self.page,
                asked.pages * self.page,
                longest_known=asked.context,
                expected=asked.context,
                alone=False,
            )
            if geometry is None or geometry.tokens < asked.context:
                raise ConfigError(
                    f"{shape.name}: {asked.batch} sequences of {asked.context} tokens are more than attention kernels "
                    "can index in 32 bits: give a smaller --batch or --context"
                )
            yield widths, geometry
