"""Reads the cost of chunks from a file: coefficients, batches to fit a cost to, or a cost model of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...allocator.errors import ManageError
from ...offload.policy.replicas.pipeline import ChunkCost, Fit, Sample, fit
from ...offload.policy.step_costs import Parts
from ..plan.machine import costs_of


def read_costs(path: Path) -> tuple[ChunkCost, Fit | None]:
    """Returns the cost in a JSON file, and its fit if it was fitted. Either alpha, beta, gamma, and optionally square,
    prefix, others, lone and decode (a cost of its own); or a list of batches, each with `seconds` and `chunks`, pairs
    (tokens before, new tokens); or fixed, row, key and pair, as without replicas. ManageError where it is none of
    these; OSError."""
    try:
        content = json.loads(path.read_text())
        if isinstance(content, list):
            made = fit(
                [Sample(tuple((int(p), int(c)) for p, c in batch["chunks"]), batch["seconds"]) for batch in content]
            )
            return made.cost, made
        if "alpha" in content:
            return _given(content), None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManageError(f"{path} is no cost of chunks: {error}") from None
    return of_parts(costs_of(path)), None


def of_parts(parts: Parts) -> ChunkCost:
    """Returns the cost of chunks that equals a cost model of steps: c new tokens read p + c keys."""
    return ChunkCost.packed(parts.fixed, parts.row, parts.key, parts.pair)


def _given(content: dict[str, Any]) -> ChunkCost:
    decode = content.pop("decode", None)
    cost = ChunkCost(**content, decode=None if decode is None else ChunkCost(**decode))
    if not cost.within + cost.beta:
        raise ValueError("a larger chunk would take no longer: give alpha or beta above 0")
    return cost
