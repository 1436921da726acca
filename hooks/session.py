"""`Session`: a conversation whose prefix is kept until it is closed."""

from __future__ import annotations

from array import array
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from ..allocator.errors import ManageError
from ..allocator.interrupts import Finalizer
from .managed import managed_as
from .prefix.store import PrefixStore, numbers


class Session:
    """One conversation with a model that is managed with `prefix_cache`. Its tokens are not evicted while it is open
    (they may lie on the host), so that each turn computes only the new ones. For one thread at a time.

        with ballonet.Session(model, tokenizer) as session:
            print(session.send("Why is the sky blue?"))
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        """`tokenizer`: for `send`. ManageError where the model keeps no prefixes."""
        managed = managed_as(model)
        if managed is None or managed.prefixes is None:
            raise ManageError(
                f"this {type(model).__name__} keeps no prefixes: call ballonet.manage(model, prefix_cache=True) first"
            )
        self.reused = 0  # tokens that the last turn did not compute
        self._model = model
        self._tokenizer = tokenizer
        self._store: PrefixStore = managed.prefixes
        self._pins = self._store.contents.index.pins
        self._tokens = array("q")
        self._messages: list[dict[str, str]] = []
        self._pinned: list[list[bytes]] = []  # more than one only while a turn runs
        self._open = True
        Finalizer(self, partial(self._pins.remove_later, self._pinned))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the conversation so far."""
        return tuple(self._tokens)

    def generate(self, new_ids: Any, **options: Any) -> torch.Tensor:
        """Appends `new_ids` (ints, or an int tensor of one sequence) and returns the tokens of the answer, int64[1,
        new]. `options`: of `model.generate()`, whose errors are raised and leave the conversation as it was."""
        return self._say(self._tokens + numbers(new_ids), options)

    def send(self, text: str, **options: Any) -> str:
        """Sends a text, by the tokenizer's chat template if it has one, and returns the text of the answer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ManageError("this Session was made without a tokenizer: give it one, or use generate()")
        messages = [*self._messages, {"role": "user", "content": text}]
        if getattr(tokenizer, "chat_template", None):
            ids = numbers(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        else:
            ids = self._tokens + numbers(tokenizer(text, add_special_tokens=not self._tokens)["input_ids"])
        answer = self._say(ids, options)
        said: str = tokenizer.decode(answer[0], skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": said}]
        return said

    def fork(self) -> Session:
        """Returns another conversation that begins with all tokens of this one."""
        self._check_open()
        other = Session(self._model, self._tokenizer)
        other._tokens, other._messages = self._tokens, list(self._messages)
        other._pin(self._tokens[:-1])
        return other

    def close(self) -> None:
        """Lets the conversation's tokens be evicted from now on. Idempotent."""
        self._open = False
        self._pin(array("q"))

    def _say(self, ids: array[int], options: dict[str, Any]) -> torch.Tensor:
        self._check_open()
        if not ids:
            raise ManageError("a Session begins with at least one token")
        prompt = torch.frombuffer(ids, dtype=torch.int64)[None].to(self._model.device)
        options.setdefault("attention_mask", torch.ones_like(prompt))
        with self._pins.recording(self._pinned):
            result = self._model.generate(prompt, **options)
        tokens: torch.Tensor = result if isinstance(result, torch.Tensor) else result.sequences
        if len(tokens) != 1:
            raise ManageError(f"a Session goes on with one sequence, and generate() returned {len(tokens)}")
        self.reused = self._store.reused
        self._tokens = numbers(tokens)
        self._pin(self._tokens[:-1])  # the last one is in no cache yet
        return tokens[:, len(ids) :]

    def _pin(self, ids: array[int]) -> None:
        self._pinned.append(self._store.pin(ids))
        while len(self._pinned) > 1:
            self._store.unpin_keys(self._pinned[0])
            self._pinned.pop(0)

    def _check_open(self) -> None:
        if not self._open:
            raise ManageError("this Session was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
