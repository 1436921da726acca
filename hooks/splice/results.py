"""The results of a stage's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Hidden:
    """The input of the next stage: the hidden states, [batch, tokens, width] as a rule, then the other tensors that
    travel between layers, in the order of `Splice.travels`. `cache`: the stage's own, to pass to the next forward of
    the same requests; None where there is none."""

    tensors: tuple[torch.Tensor, ...]
    cache: Any = None


@dataclass(frozen=True, slots=True)
class Logits:
    """The model's result on the last stage. `cache`: as in Hidden."""

    output: Any
    cache: Any = None

    @property
    def logits(self) -> torch.Tensor:
        """[batch, tokens, vocabulary]."""
        found: torch.Tensor = self.output["logits"] if isinstance(self.output, dict) else self.output[0]
        return found
