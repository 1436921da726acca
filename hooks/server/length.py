"""How long a sequence a server takes: no longer than the model was made for.

Note [Longer than the model]
    transformers goes on beyond that: rotary positions can be computed for any token, only what the model says then is
    worth less and less. A server tells its client instead, who may have meant another model. `generate_batch` stays as
    stock, but for models with a table of positions, where a step that looks behind the table's end would fail every
    request (`Batched.positions`).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException

from ...allocator.errors import SequenceTooLong
from ..compat import longest_sequence

# does the request that is handled leave open how long its answer may be?
is_open: ContextVar[bool] = ContextVar("is_open", default=False)


def fit(request: str, model: Any, prompt: int, options: Any) -> None:
    """Looks whether `prompt` tokens and new ones are no more than the model was made for, as far as its configuration
    says. An answer whose length the client has left open ends there. `options`: the GenerationConfig. HTTPException."""
    longest, new = longest_sequence(model.config), options.max_new_tokens or 0
    if not longest or prompt + new <= longest:
        return
    if is_open.get() and prompt < longest:
        options.max_new_tokens = longest - prompt
        return
    raise HTTPException(413, str(SequenceTooLong(request, prompt, new, longest)))
