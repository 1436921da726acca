"""Time per token against the budget, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...allocator.errors import ConfigError
from .curve import check


def draw(
    path: str | Path, points: Sequence[tuple[int, float]], title: str, asked: int, slo: float | None = None
) -> None:
    """`points`: (bytes of budget, seconds per token); `asked`: the budget that was asked about; `slo`: seconds.
    ConfigError."""
    check(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot([size / 2**30 for size, _ in points], [1e3 * seconds for _, seconds in points], color="#3b6fb6")
    axes.axvline(asked / 2**30, color="#e08a2c", label="the budget that was asked about")
    if slo is not None:
        axes.axhline(1e3 * slo, color="#404040", linestyle="--", label="the SLO")
    axes.set(xlabel="budget, GiB", ylabel="ms per token", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
