"""Draws time per token against the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import ConfigError

SUFFIXES: Final = (".svg", ".png")


def check(path: str | Path) -> None:
    """Raises ConfigError where a picture could not be drawn to `path`, before any long work."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} has none of the suffixes of a picture: {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("drawing a curve needs matplotlib: pip install 'ballonet[demo]'")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no such folder")


@contextmanager
def picture(path: str | Path) -> Iterator[Any]:
    """Yields axes, and at the end writes what was drawn on them to `path`. ConfigError where that cannot be."""
    check(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    try:
        yield axes
        axes.set_ylim(bottom=0)
        figure.tight_layout()
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


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
