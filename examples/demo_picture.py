"""The picture of the demo: who owned which page in each run, over time, under the line of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballonet.allocator.units import format_size

MIB = 2**20


def draw(path: Path, runs: Mapping[str, Mapping[str, Any]], weights: int) -> None:
    """One panel per run, all to the same scale. `runs`: title → page_size, start, stop, rows, levels, marks, as in a
    `Recording`; `weights`: bytes of the model's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ballonet.offload.timeline.file import COLOURS

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(11, 3.1 * len(runs)), squeeze=False, layout="constrained")
    highest = max(level[1] for run in runs.values() for level in run["levels"]) / MIB
    for panel, (title, run) in zip(axes[:, 0], runs.items(), strict=True):
        _panel(panel, run)
        panel.axhline(weights / MIB, color=COLOURS["weights"], linestyle=":", linewidth=1.2, label="all weights")
        panel.set_title(title, loc="left", fontsize="medium")
        panel.set_ylim(0, highest * 1.2)  # the words of the phases stand above
        panel.set_ylabel("MiB")
    axes[-1, 0].set_xlabel("seconds")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    page = format_size(next(iter(runs.values()))["page_size"], gap=" ")
    figure.suptitle(f"Who owns the pages ({page} each): the same answer with less and less memory")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(panel: Any, run: Mapping[str, Any]) -> None:
    from ballonet.offload.timeline.file import draw_pages

    rows = [tuple(row) for row in run["rows"]]
    marks = [(when, name) for name, when in run["marks"]]
    draw_pages(panel, rows, run["levels"], marks, (run["start"], run["stop"]), run["page_size"])
