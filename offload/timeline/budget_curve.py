"""Time per token against the budget, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .curve import picture


def draw(
    path: str | Path, points: Sequence[tuple[int, float]], title: str, asked: int, slo: float | None = None
) -> None:
    """Draws the curve to `path`. `points`: (bytes of budget, seconds per token); `asked`: the budget in question;
    `slo`: seconds. ConfigError."""
    with picture(path) as axes:
        axes.plot([size / 2**30 for size, _ in points], [1e3 * seconds for _, seconds in points], color="#3b6fb6")
        axes.axvline(asked / 2**30, color="#e08a2c", label="the budget that was asked about")
        if slo is not None:
            axes.axhline(1e3 * slo, color="#404040", linestyle="--", label="the SLO")
        axes.set(xlabel="budget, GiB", ylabel="ms per token", title=title)
        axes.legend()
