"""Chooses the page size where none was set, from the sizes of ranges. Pure.

Note [What rounding costs]
    Each layer of weights and each region of a cache ends in the middle of a page, so on small models what is lost to
    rounding can be more than what elasticity gains: 23 of 240 MiB for a model of 12 layers and 155 MiB in pages of
    2 MiB. Larger pages cost fewer driver calls. So the largest page counts whose rounding takes no more than a small
    part of what the weights leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tuning import DEFAULT, Serving


@dataclass(frozen=True, slots=True)
class Rounding:
    """A page size in bytes. `lost`: bytes lost by rounding to it; `left`: those that the weights leave of the budget;
    `most`: the part of these that may be lost."""

    page: int
    lost: int
    left: int
    most: float

    @property
    def share(self) -> float:
        """The part that is lost; 1 where the weights leave nothing."""
        return min(1.0, self.lost / self.left) if self.left > 0 else 1.0


def fitting(
    ranges: Sequence[int], caches: int, budget: int, usual: int, smallest: int, tuning: Serving = DEFAULT.serving
) -> Rounding:
    """Returns the largest page size, of `usual` and its halves down to `smallest`, that loses little enough; where none
    does, the smallest of them. `ranges`: bytes of each range of weights; `caches`: paged caches on the budget, each of
    which ends in a few pages of its own."""
    page = usual
    while (rounding := _rounding(ranges, caches, budget, page, tuning)).share > rounding.most and page // 2 >= smallest:
        page //= 2
    return rounding


def _rounding(ranges: Sequence[int], caches: int, budget: int, page: int, tuning: Serving) -> Rounding:
    lost = sum(-nbytes % page for nbytes in ranges) + caches * tuning.ends * page
    return Rounding(page, lost, budget - sum(ranges), tuning.rounding)
