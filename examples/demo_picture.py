"""The picture of the demo: who owned which page in each run, over time, under the line of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballonet.allocator.units import format_size

MIB = 2**20
COLORS = {"weights": "#3b6fb6", "kv": "#e08a2c", "activations": "#58a55c", "retiring": "#b65a9a", "free": "#d9d9d9"}
NAMES = {"kv": "KV cache", "retiring": "retiring (waits for what still uses it)", "free": "free, kept for the next"}
POINTS = 600


def draw(path: Path, runs: Mapping[str, Mapping[str, Any]], weights: int) -> None:
    """One panel per run, all to the same scale. `runs`: title → page_size, start, stop, rows, levels, marks, as in a
    `Recording`; `weights`: bytes of the model's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(11, 3.1 * len(runs)), squeeze=False, layout="constrained")
    highest = max(level[1] for run in runs.values() for level in run["levels"]) / MIB
    for panel, (title, run) in zip(axes[:, 0], runs.items(), strict=True):
        _panel(panel, run)
        panel.axhline(weights / MIB, color=COLORS["weights"], linestyle=":", linewidth=1.2, label="all weights")
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
    from ballonet.offload.timeline.series import resample

    start, stop, page = run["start"], run["stop"], run["page_size"]
    series = resample([tuple(row) for row in run["rows"]], start, stop, POINTS)
    stacks = [[count * page / MIB for count in series.pages[owner]] for owner in COLORS]
    labels = [NAMES.get(owner, owner) for owner in COLORS]
    panel.stackplot(series.seconds, stacks, labels=labels, colors=list(COLORS.values()), step="post")

    def seconds(when: int) -> float:
        return (when - start) / 1e9

    end = seconds(stop)
    times = [seconds(level[0]) for level in run["levels"]]
    budgets = [level[1] / MIB for level in run["levels"]]
    panel.step([*times, end], [*budgets, budgets[-1]], where="post", color="black", linestyle="--", label="budget")
    for name, when in run["marks"]:
        panel.axvline(seconds(when), color="#555555", linewidth=0.8)
        panel.annotate(
            name,
            (seconds(when), 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -4),
            textcoords="offset points",
            va="top",
            fontsize="small",
        )
    panel.set_xlim(0, end)
