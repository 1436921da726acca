"""The changes that would help a forward that found no memory, by a plan of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from ...allocator import install
from .planner import plan


def changes(config: Any, *, batch: int, context: int, budget: int, page_size: int) -> Sequence[str]:
    """Returns the nearest changes with which `batch` sequences of `context` tokens, of a model with this configuration,
    fit into so many bytes of device pages; none where they fit by the plan, or no plan can be made. Raises nothing, as
    it runs while another error is worded."""
    try:
        with tempfile.TemporaryDirectory(prefix="ballonet-") as folder, install.stock():
            config.save_pretrained(folder)
            facts = plan(folder, context=context, prompt=context, batch=batch, budget=budget, page_size=page_size)
    except Exception:  # any error: unknown configurations, and transformers' own code for them
        return ()
    return [] if facts["fits"] else [change["text"] for change in facts["changes"] if change["fits"]]
