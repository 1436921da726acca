"""A step of a generation loop in which each request has one new token, by pieces: rows padded to a few sizes, attention
for the real ones.

Note [Padded rows]
    Graphs are captured for 8, 16, 32, ... rows. The inputs of a step are padded to the next of these, in the recorded
    forward too, since other numbers of rows may take other kernels. Attention and the cache's update get the real rows,
    so padding is written to no cache, and its results are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

ROWS: Final = ("input_ids", "position_ids")  # arguments with a column per row, [1, rows]
KEPT: Final = "logits_to_keep"  # rows that logits are wanted of, [rows]
SMALLEST: Final = 8  # rows of a graph


class BatchStep:
    """A step of one loop: what its attention needs beside the model's tensors."""

    def __init__(self, cache: Any, given: Mapping[str, Any]) -> None:
        """`cache`: of the loop, which attends by request. `given`: keyword arguments of the forward."""
        self.cache = cache
        self.given = given
        self.rows: int = given["input_ids"].shape[1]

    def attend(self, layer: int, query: Any, keys: Any, values: Any, scale: Any, dropout: Any) -> torch.Tensor:
        """Updates the cache and attends, with the real rows of a layer's new tokens, [1, heads, rows, dim]. Returns
        [1, rows, heads, dim], zeros in the padding."""
        rows = self.rows
        given = dict(self.given)
        attended: torch.Tensor = self.cache.update_and_attend(
            query.narrow(2, 0, rows), keys.narrow(2, 0, rows), values.narrow(2, 0, rows), layer, given, scale, dropout
        )
        if rows == query.shape[2]:
            return attended
        padded = attended.new_zeros(1, query.shape[2], *attended.shape[2:])
        padded.narrow(1, 0, rows).copy_(attended)
        return padded

    def padded(self) -> dict[str, Any]:
        """Returns the arguments with padded rows."""
        size = SMALLEST
        while size < self.rows:
            size *= 2
        more = size - self.rows
        given = dict(self.given)
        for name in ROWS:
            if (value := given.get(name)) is not None:
                given[name] = torch.nn.functional.pad(value, (0, more))
        if isinstance(kept := given.get(KEPT), torch.Tensor):
            given[KEPT] = torch.nn.functional.pad(kept, (0, size - kept.shape[0]))
        return given

    def cut(self, output: Any) -> Any:
        """Returns a model's output without the padding."""
        output.logits = output.logits[:, : self.rows]
        return output


def attend(step: BatchStep, layer: int, query: Any, keys: Any, values: Any, scale: Any, dropout: Any) -> torch.Tensor:
    """Attends for the step that runs: an eager call, whose first argument differs from step to step."""
    return step.attend(layer, query, keys, values, scale, dropout)
