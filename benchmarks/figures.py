"""Keeps the figures of the last `make bench` in benchmarks/results/ and puts them into README and docs/measuring.md.

Each document has a section between two marks; what stands between them is made here and nowhere else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = {
    ROOT / "README.md": ("kv-growth", "decode", "allocate", "traces"),
    ROOT / "docs" / "measuring.md": ("page-size",),
}


def main() -> None:
    measured = [json.loads(path.read_text()) for path in sorted((ROOT / "build").glob("bench-*.json"))]
    if not measured:
        raise SystemExit("nothing was measured yet: make bench")
    RESULTS.mkdir(exist_ok=True)
    for each in measured:
        (RESULTS / f"{slug(each['machine'])}-{each['benchmark']}.json").write_text(json.dumps(each, indent=1) + "\n")
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    for document, names in SHOWN.items():
        tables = [table(each) for name in names for each in results if each["benchmark"] == name]
        before, opening, rest = document.read_text().partition("<!-- figures -->\n")
        _, closing, after = rest.partition("<!-- end of figures -->")
        document.write_text(before + opening + "\n".join(tables) + closing + after)


def slug(machine: dict[str, Any]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")


def table(result: dict[str, Any]) -> str:
    """One benchmark as Markdown: what, where and by which command, then the rows."""
    machine = result["machine"]
    program = f"benchmarks/bench_{result['benchmark'].replace('-', '_')}.py"
    lines = [
        f"**{result['title'][0].upper()}{result['title'][1:]}**  ",
        f"{machine['cpu']}, {machine['cores']} cores, no GPU, torch {machine['torch']}, transformers "
        f"{machine['transformers']}; `python {program}`",
        "",
        "| " + " | ".join(result["columns"]) + " |",
        "|" + "---|" * len(result["columns"]),
        *("| " + " | ".join(cell(value) for value in row) + " |" for row in result["rows"]),
        "",
    ]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A median with its spread, or a plain value."""
    if isinstance(value, dict):
        return str(Figure(**value))
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
