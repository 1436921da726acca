"""A preflight's result for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show(found: Mapping[str, Any], kept: object) -> None:
    """Prints answers, differences and what was chosen. `kept`: the file that `install()` reads, None where none was
    written."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    answers = Table(
        "question", "answer", title=f"{found['key']['device']}, {found['key']['driver']}", title_justify="left"
    )
    for each in found["answers"]:
        answers.add_row(escape(each["question"]), escape(each["answer"]))
    console.print(answers)
    if found["differences"]:
        table = Table("what", "assumed", "found", "so", title="what differs from what ballonet assumes")
        for each in found["differences"]:
            table.add_row(*(escape(each[name]) for name in ("what", "assumed", "found", "effect")))
        console.print(table)
    else:
        console.print("Nothing differs from what ballonet assumes.")
    for name, value in found["settings"].items():
        console.print(f"chosen: {name} = {value} ({escape(found['reasons'][name])})")
    if kept is not None:
        console.print(f"install() keeps to it on this device and driver: {kept}")
