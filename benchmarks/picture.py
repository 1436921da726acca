"""Draws what was measured of streaming: time per token by what streams, beside the bound and the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Case = tuple[int, int]  # sequences, tokens held


def draw(figure: Mapping[str, Any], title: str, path: Path) -> None:
    """`figure`: of bench_streaming.py, as its JSON has it; a panel for each case. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = by_case(figure)
    with matplotlib.rc_context({"svg.hashsalt": "ballonet", "font.size": 9}):
        drawn, panels = pyplot.subplots(1, len(cases), figsize=(max(6, 4.5 * len(cases)), 3.6), squeeze=False)
        for panel, ((sequences, held), rows) in zip(panels[0], cases.items(), strict=True):
            names = list(rows)
            panel.bar(names, [ms for ms, _ in rows.values()], color="tab:blue", width=0.6)
            for place, (_, bound) in enumerate(rows.values()):
                if bound is not None:
                    panel.hlines(bound, place - 0.4, place + 0.4, color="black", linewidth=2)
            panel.set_title(f"{sequences} x {held:,} tokens held", fontsize=9)
            panel.set_ylabel("ms per token; black: max(resident, bytes / link)", fontsize=8)
            panel.tick_params(axis="x", rotation=30)
        drawn.suptitle(title, fontsize=9)
        drawn.tight_layout()
        drawn.savefig(path, metadata={"Date": None})
        pyplot.close(drawn)


def by_case(figure: Mapping[str, Any]) -> dict[Case, dict[str, tuple[float, float | None]]]:
    """By case and by what streams: ms per token, and of the bound where there is one."""
    found: dict[Case, dict[str, tuple[float, float | None]]] = {}
    place = figure["columns"].index
    for row in figure["rows"]:
        case = (row[place("sequences")], row[place("tokens held")])
        bound = row[place("bound, ms")]
        ms = row[place("ms per token")]["median"]
        found.setdefault(case, {})[row[place("what streams")]] = (ms, bound if bound != "" else None)
    return found
