"""The names of figures that examples/grafana.json asks Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parent.parent / "examples" / "grafana.json"
_SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


def expressions() -> list[str]:
    """All that it asks, of its panels and its variables."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [entry["query"]["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    return [*panels, *variables]


def asked(expression: str) -> set[str]:
    """Names of samples in an expression of PromQL: all names but functions, labels, words of the language and what is
    in braces and brackets."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", expression)
    bare = re.sub(r"\b(by|without)\s*\([^)]*\)", "", bare)
    names = set(re.findall(r"[A-Za-z_:][\w:]*(?!\w*\s*\()", bare))
    return {name for name in names if not re.search(rf"\b{name}\s*\(", bare)} - {"instance"}


def labels(expression: str) -> set[str]:
    """Names of labels in it."""
    selected = re.findall(r"(\w+)\s*(?:=~|!=|=|!~)", " ".join(re.findall(r"\{([^}]*)\}", expression)))
    grouped = re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", expression)
    return {*selected, *(name.strip() for group in grouped for name in group.split(","))}


def sample_names(page: str) -> Iterator[tuple[str, Any]]:
    """(name, family) of each kind of sample that a page of figures may have, those without any yet, too."""
    for family in text_string_to_metric_families(page):
        for ending in _SAMPLES.get(family.type, ("",)):
            yield family.name + ending, family
