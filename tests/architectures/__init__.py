"""Tiny configurations of the architectures on which the proof of equal tokens is made, and what stock refuses of them.

Two or three layers, of every kind that an architecture has; windows are shorter than the prompts. Where layers differ
the elastic ones do not come last: chaos moves, between layers, what the forward has written so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .base import LAYERS, PAD, TEXT, VOCABULARY, Architecture
from .decoders import DECODERS, EXPERT_MODELS, PLAIN
from .encoder_decoders import ENCODER_DECODERS
from .multimodal import MULTIMODAL
from .recurrent import RECURRENT

__all__ = ["ARCHITECTURES", "LAYERS", "PAD", "PLAIN", "TEXT", "VOCABULARY", "Architecture"]

ARCHITECTURES: Final[Mapping[str, Architecture]] = (
    PLAIN | DECODERS | EXPERT_MODELS | RECURRENT | ENCODER_DECODERS | MULTIMODAL
)
