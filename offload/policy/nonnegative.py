"""Least squares without negative coefficients: each coefficient is a time, and no time is negative."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray


def fitted(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, ...] | None:
    """Returns the coefficients (one for each column) whose products with `rows` (samples x columns) come closest to
    `seconds` (samples), errors relative to them: a long sample says no more than a short one. Of all sets of columns
    whose least squares are positive the one that fits best counts, so few columns only. None where no set has any."""
    relative = rows / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    known = np.flatnonzero(scale).tolist()
    scaled, ones = relative / np.where(scale, scale, 1), np.ones(len(seconds))
    best, least = None, math.inf
    for count in range(1, len(known) + 1):
        for chosen in combinations(known, count):
            coefficients = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ coefficients - ones) ** 2))
            if (coefficients > 0).all() and error < least * (1 - 1e-9):
                least, best = error, dict(zip(chosen, coefficients.tolist(), strict=True))
    if best is None:
        return None
    return tuple(best.get(n, 0.0) / (float(scale[n]) or 1.0) for n in range(len(scale)))
