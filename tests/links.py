"""A link that several models ask for more than it has."""

from __future__ import annotations


def fair(wanted: list[float], link: float) -> list[float]:
    """What each gets of a link that serves all alike, worked out by filling: equal parts until somebody has enough."""
    got = [0.0] * len(wanted)
    hungry = {n for n, want in enumerate(wanted) if want > 0}
    while hungry and link > 1e-9:
        part = min(link / len(hungry), min(wanted[n] - got[n] for n in hungry))
        for n in hungry:
            got[n] += part
        link -= part * len(hungry)
        hungry = {n for n in hungry if wanted[n] - got[n] > 1e-9}
    return got
