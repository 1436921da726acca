"""Pages of a model at the moments that a plan is made of: the prompt, and the last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

from ...allocator.errors import ConfigError
from ...offload.policy.geometry import Geometry
from ...offload.policy.layout import place
from ...offload.policy.planner.changes import Question
from ...offload.policy.planner.needs import Moment, Needs
from ..compat import one_shape
from ..device import governors
from ..kv.grouping import Sizes, geometry_for
from ..weights.layers import decoder_layers
from ..weights.room import working_pages
from .forward import Seen, seen
from .shape import Shape

_INDEX = 8  # bytes of a token's number


class Sizing:
    """Answers what one model needs, and remembers what its forwards were seen to do."""

    def __init__(self, shape: Shape, page: int) -> None:
        """`page`: bytes."""
        self.shape = shape
        self.page = page
        self.seen = cache(self._seen)

    def _seen(self, batch: int, prompt: int, context: int) -> tuple[Seen, Seen]:
        return seen(self.shape, batch, prompt, context)

    def saved(self, bits: int | None) -> int:
        """Bytes of weights that so many bits of an element save."""
        before, after = (sum(each.nbytes for each in self.shape.blocks(how)) for how in (None, bits))
        return before - after

    def needs(self, name: str, asked: Question, seconds: tuple[float | None, float | None]) -> Needs:
        """Pages; `seconds` of a prefill and of a decode step. ConfigError."""
        shape, tuning = self.shape, governors.composed_with().tuning.weights
        layout = place(shape.blocks(asked.bits), self.page, tuning.large)
        layers = layout.layer_pages(shape.layers)
        working = working_pages(shape.model, decoder_layers(shape.model), self.page, tuning)
        first, last = self.seen(asked.batch, asked.prompt, asked.context)
        return Needs(
            name,
            layers,
            layout.pages - sum(layers),
            layout.spare(sources=False, working=working),
            self._moment(asked, asked.prompt, first),
            self._moment(asked, asked.context, last),
            asked.prompt,
            *seconds,
        )

    def _moment(self, asked: Question, tokens: int, forward: Seen) -> Moment:
        ranges = list(self._ranges(asked))
        kv = tuple(each.parts * each.pieces(tokens) for each in ranges)
        movable = sum(each.parts * each.full(tokens) for each in ranges)
        prompts = 2 * (2 * asked.batch * tokens * _INDEX)  # `generate()` appends to the tokens and their mask by a copy
        small = governors.composed_with().tuning.weights.small_blocks
        return Moment(kv, movable, -(-(forward.peak + prompts) // self.page) + small)

    def _ranges(self, asked: Question) -> Iterator[Geometry]:
        """The ranges of the cache, as the first layers that append make them (grouping.py)."""
        shape = self.shape
        together = len(shape.widths) if one_shape(shape.config) else 1
        for widths, count in Counter(shape.widths.values()).items():
            sizes = Sizes(asked.batch, *widths, shape.dtype.itemsize)
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
            yield from [geometry] * -(-count // geometry.layers)
