"""What became of the models of this process, `ballonet.report()`: what was managed, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...allocator.units import table
from .report import Report


class Outcomes:
    """How the models of one runtime fared, by the names of their classes, for as long as the runtime lives."""

    def __init__(self) -> None:
        self.managed = Counter[str]()  # how often
        self.left: dict[str, str] = {}  # not managed, or in part -> why

    def note_managed(self, model: nn.Module) -> None:
        """Notes a model that is managed from now on, with its parts."""
        self.managed[type(model).__name__] += 1
        for part in model.modules():
            self.left.pop(type(part).__name__, None)

    def note_left(self, name: str, why: str) -> None:
        """Notes a model that stays as torch made it, or a part of it does."""
        self.left[name] = why


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """`models`: the reports of those that are managed now. `managed`: how often models of a class were managed.
    `left`: classes of models that stay as torch made them, or in part, and why."""

    models: tuple[Report, ...]
    managed: Mapping[str, int]
    left: Mapping[str, str]

    @property
    def conclusion(self) -> str:
        """One line that says it all."""
        names = ", ".join(f"{name} ({times} times)" if times > 1 else name for name, times in self.managed.items())
        outside = sum(len(report.unmanaged_tensors) for report in self.models)
        parts = [f"managed {names}" if names else "no model was managed"]
        if outside:
            parts.append(f"{outside} tensors of them are outside of the pool")
        parts += [f"NOT managed {name}: {why}" for name, why in self.left.items()]
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "models": [report.as_dict() for report in self.models],
            "managed": dict(self.managed),
            "left": dict(self.left),
        }

    def __str__(self) -> str:
        return "\n".join([f"ballonet: {self.conclusion}", *map(str, self.models)])

    def _repr_html_(self) -> str:
        """Renders the report for a notebook."""
        rows = list(self._rows())
        return "".join(
            [table("models", ("model", ""), rows) if rows else "", *(report._repr_html_() for report in self.models)]
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        for name, times in self.managed.items():
            yield name, "managed" if times == 1 else f"managed {times} times"
        for name, why in self.left.items():
            yield name, f"not managed: {why}"
