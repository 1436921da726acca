"""A preflight's result for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show(result: Mapping[str, Any], kept: object) -> None:
    """Prints answers, differences and what was chosen. `kept`: the file that `install()` reads, None where none was
    written."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    answers = Table(
        "question", "answer", title=f"{result['key']['device']}, {result['key']['driver']}", title_justify="left"
    )
    for answer in result["answers"]:
        answers.add_row(escape(answer["question"]), escape(answer["answer"]))
    console.print(answers)
    if result["differences"]:
        table = Table("what", "assumed", "found", "so", title="what differs from what ballonet assumes")
        for difference in result["differences"]:
            table.add_row(*(escape(difference[name]) for name in ("what", "assumed", "found", "effect")))
        console.print(table)
    else:
        console.print("Nothing differs from what ballonet assumes.")
    for name, value in result["settings"].items():
        console.print(f"chosen: {name} = {value} ({escape(result['reasons'][name])})")
    if kept is not None:
        console.print(f"install() keeps to it on this device and driver: {kept}")
