"""What a stage makes of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the next stage needs of this forward: the hidden states, [batch, tokens, width] as a rule, first, then what
    else travels between layers, in the order of `Splice.travels`. `cache`: the stage's own, which the next forward of
    the same requests is given; None where there is none."""

    tensors: tuple[torch.Tensor, ...]
    cache: Any = None


@dataclass(frozen=True, slots=True)
class Logits:
    """What the model returned on the last stage. `cache`: as in Hidden."""

    output: Any
    cache: Any = None

    @property
    def logits(self) -> torch.Tensor:
        """[batch, tokens, vocabulary]."""
        found: torch.Tensor = self.output["logits"] if isinstance(self.output, dict) else self.output[0]
        return found
