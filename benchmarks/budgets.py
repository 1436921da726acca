"""What is measured at a budget: which model, pages of which size.

This module imports neither torch nor transformers: of a benchmark's process itself no more is needed.
"""

from __future__ import annotations

from common import GIB, Options, describe_few

STOCK, OURS = "stock", "ballonet"
LAYERS = {"cuda": 32, "cpu": 16, "tiny": 4}  # of what `llama.few` gives: on a GPU that is the whole 8B shape


def page_size(chosen: Options) -> int | None:
    """Bytes; on the stand-in small, as models are."""
    return None if chosen.cuda else 2**16 if chosen.tiny else 2**18


def unlimited(chosen: Options) -> int:
    """Bytes of a budget that is never met."""
    return 64 * GIB if chosen.cuda else 2 * GIB


def what(chosen: Options) -> str:
    """The model, in words, for a title; on a CPU also what stock is."""
    text = describe_few(chosen, LAYERS[chosen.kind])
    return text if chosen.cuda else f"{text}; stock in a plain pool of that budget"
