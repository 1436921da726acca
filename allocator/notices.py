"""Warnings, each one sentence of ballonet's at the line of the program that it is about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Final

_NOT_THE_PROGRAM: Final = frozenset({"ballonet", "torch", "transformers", "accelerate", "runpy", "threading"})


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns of `text`, without "ballonet: " before it, at the first frame outside of ballonet and the libraries that
    call it; at the outermost frame where there is no such."""
    frame: FrameType = sys._getframe(1)
    while _is_inside(frame) and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    warnings.warn_explicit(
        f"ballonet: {text}",
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__", "<unknown>"),
        names.setdefault("__warningregistry__", {}),
    )


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_PROGRAM
