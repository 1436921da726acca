"""Pictures drawn with matplotlib: pages by owner over time, and time per token against the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import ConfigError
from .series import COLOURS, Level, Row, SeriesRecording, resample

SUFFIXES: Final = (".svg", ".png")
_NAMES: Final = {"kv": "KV cache", "retiring": "retiring (waits for what still uses it)", "free": "free, kept"}


def check(path: str | Path) -> None:
    """Raises ConfigError where a picture could not be drawn to `path`, before any long work."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} has none of the suffixes of a picture: {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("drawing a picture needs matplotlib: pip install 'ballonet[demo]'")
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


def draw_curve(
    path: str | Path, points: Sequence[tuple[int, float]], title: str, asked: int, slo: float | None = None
) -> None:
    """Draws time per token against the budget to `path`. `points`: (bytes of budget, seconds per token); `asked`: the
    budget in question; `slo`: seconds. ConfigError."""
    with picture(path) as axes:
        axes.plot([size / 2**30 for size, _ in points], [1e3 * seconds for _, seconds in points], color="#3b6fb6")
        axes.axvline(asked / 2**30, color="#e08a2c", label="the budget that was asked about")
        if slo is not None:
            axes.axhline(1e3 * slo, color="#404040", linestyle="--", label="the SLO")
        axes.set(xlabel="budget, GiB", ylabel="ms per token", title=title)
        axes.legend()


def draw_recording(path: str | Path, recording: SeriesRecording) -> None:
    """Draws pages by owner under the line of the budget to `path`. ConfigError."""
    with picture(path) as axes:
        span = recording.start, recording.stop
        draw_pages(axes, recording.rows, recording.levels, recording.marks, span, recording.page_size)
        axes.set(xlabel="seconds", ylabel="MiB")
        axes.legend(loc="upper right")


def draw_pages(
    axes: Any,
    rows: Sequence[Row],
    levels: Sequence[Level],
    marks: Sequence[tuple[int, str]],
    span: tuple[int, int],
    page_size: int,
) -> None:
    """Draws pages by owner in MiB on axes, the budget as a line above them and a line for each mark. `span`: first and
    last ns; the others: see SeriesRecording."""
    start, stop = span

    def seconds(when: int) -> float:
        return (when - start) / 1e9

    series = resample(rows, start, stop, points=600)
    stacks = [[count * page_size / 2**20 for count in series.pages[owner]] for owner in COLOURS]
    labels = [_NAMES.get(owner, owner) for owner in COLOURS]
    axes.stackplot(series.seconds, stacks, labels=labels, colors=list(COLOURS.values()), step="post")
    times = [*(seconds(level[0]) for level in levels), seconds(stop)]
    budgets = [*(level[1] / 2**20 for level in levels), levels[-1][1] / 2**20]
    axes.step(times, budgets, where="post", color="black", linestyle="--", label="budget")
    for when, name in marks:
        axes.axvline(seconds(when), color="#555555", linewidth=0.8)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (3, -4), "textcoords": "offset points"}
        axes.annotate(name, (seconds(when), 1), va="top", fontsize="small", **place)
    axes.set_xlim(0, seconds(stop))
