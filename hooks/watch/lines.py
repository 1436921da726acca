"""The output of `top` without a terminal: a line for each process, and one for each new decision."""

from __future__ import annotations

from collections.abc import Iterator

from .dialog import whose
from .processes import SeenProcess
from .wording import decision, sections_of, title_of


def lines_of(seen: SeenProcess) -> Iterator[str]:
    """Yields the lines of one look: all that is shown except bars, and its new decisions."""
    parts = [title_of(seen)]
    if seen.trouble:
        parts.append(seen.trouble)
    for section in sections_of(seen):
        if section.title != "decisions" and section.rows:
            parts.append(f"{section.title}: " + "; ".join(f"{row.name} {row.text}".strip() for row in section.rows))
    yield " | ".join(parts)
    if not seen.trouble:
        for event in seen.decisions if seen.before is None else seen.now["events"]:
            yield " | ".join(
                [whose(seen.pid, seen.number if seen.one_of_several else None), *decision(event, seen.now)]
            )
