"""How numbers are shown in a notebook: a small table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """As HTML. Numbers are set on the right, with their thousands apart; cells may not hold HTML of their own."""
    head = "".join(f'<th style="text-align: {_side(name == columns[0])}">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<table><caption style="text-align: left; font-weight: bold">{escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return f'<td style="text-align: {_side(not text[:1].isdigit())}">{escape(text)}</td>'


def _side(left: bool) -> str:
    return "left" if left else "right"
