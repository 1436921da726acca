"""The longest sequence that a server takes: that of the model's configuration.

Note [Longer than the model]
    transformers goes on beyond that: rotary positions can be computed for any token, but answers get worse and worse. A
    server refuses instead, as the client may have meant another model. `generate_batch` stays as stock, except for
    models with a table of positions, where a step that reads behind the table's end would fail every request
    (`Batched.positions`).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException

from ...allocator.errors import SequenceTooLong
from ..compat import longest_sequence

# does the present request leave open how long its answer may be?
is_open: ContextVar[bool] = ContextVar("is_open", default=False)


def fit(request: str, model: Any, prompt: int, options: Any) -> None:
    """Checks that `prompt` tokens and new ones fit into the model's longest sequence, if its configuration has one, and
    ends an answer of open length there. `options`: the GenerationConfig. HTTPException."""
    longest, new = longest_sequence(model.config), options.max_new_tokens or 0
    if not longest or prompt + new <= longest:
        return
    if is_open.get() and prompt < longest:
        options.max_new_tokens = longest - prompt
        return
    raise HTTPException(413, str(SequenceTooLong(request, prompt, new, longest)))
