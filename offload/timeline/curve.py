"""Hit rates of a prefix cache against its size, drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import ConfigError

SUFFIXES: Final = (".svg", ".png")
_NAMES: Final = {"odds": "ballonet (odds)", "lru": "least recently used"}
_COLORS: Final = {"odds": "#3b6fb6", "lru": "#e08a2c"}


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
    path: str | Path, sizes: Sequence[int], rates: Mapping[str, Sequence[float]], capacity: int, infinite: float
) -> None:
    """Draws the curve to `path`. `sizes`: blocks; `rates`: at each, by policy; `capacity`: the size in question.
    ConfigError."""
    with picture(path) as axes:
        for policy, found in rates.items():
            axes.plot(sizes, found, marker="o", markersize=4, label=_NAMES[policy], color=_COLORS[policy])
        axes.axhline(infinite, color="#404040", linestyle="--", label=f"a cache that evicts nothing ({infinite:.4f})")
        axes.axvline(capacity, color="#d0d0d0", zorder=0)
        axes.set(
            xscale="log", xlabel="blocks that the cache holds", ylabel="hit rate", title="Prefix cache: blocks found"
        )
        axes.legend(loc="lower right")
