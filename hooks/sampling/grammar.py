"""Grammars that hold answers to a form: JSON of a schema, a regular expression, one of some texts. By llguidance, which
is optional: `pip install 'ballonet[structured]'`.

Note [llguidance]
    It needs no other package, and no kernels: which tokens may come is worked out in Rust, on the host, without
    Python's lock, while the device computes the forward. A grammar is parsed at once and its tokens are tried as they
    are needed, with a limit of work for each, so no schema makes its clients or others wait. xgrammar works masks out
    before the first token, and brings apache-tvm-ffi, triton and pydantic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import torch

from ...allocator.errors import ExtraMissing
from .sampler import WORD

Kind = Literal["json_schema", "regex", "choice", "lark"]


def grammar_of(kind: Kind, text: str) -> str:
    """Returns a grammar, as `Sampling.grammar` has it. `text`: a JSON schema ('{"type": "object"}': any object), a
    regular expression, a JSON list of texts, or llguidance's Lark. ModuleNotFoundError; ValueError where it is none, or
    too much work."""
    from llguidance import LLMatcher, grammar_from

    grammar: str = grammar_from(kind, text)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(f"{kind}: {messages[0]}")
    return grammar


class GrammarRefused(Exception):
    """A grammar cannot be used, or none can with this model or installation."""


class Grammars:
    """Grammars over the tokens of one model. `ends`: its tokens that end an answer; they alone may follow a complete
    one."""

    def __init__(self, tokenizer: Any, ends: Iterable[int], vocabulary: int) -> None:
        """`tokenizer`: a fast one of transformers; `vocabulary`: logits of the model."""
        self.ends = tuple(ends)
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    @functools.cached_property
    def tokens(self) -> Any:
        """The tokens as llguidance has them. Takes about a second, once. GrammarRefused."""
        try:
            from llguidance.hf import from_tokenizer

            known = len(self._tokenizer) if self.ends else 0
            if not (ends := [end for end in self.ends if end < known]):
                raise GrammarRefused("the model has no token that ends an answer")
            return from_tokenizer(self._tokenizer, n_vocab=max(self._vocabulary, known), eos_token=ends)
        except ModuleNotFoundError:
            raise GrammarRefused(str(ExtraMissing("grammars", "llguidance", "structured"))) from None
        except ValueError as error:
            raise GrammarRefused(f"the model's tokenizer has no grammars: {error}") from None

    def matcher(self, grammar: str) -> Matcher:
        """Makes the matcher of one answer. GrammarRefused."""
        tokens = self.tokens
        from llguidance import LLMatcher

        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarRefused(f"the grammar cannot be used: {matcher.get_error()}")
        return Matcher(matcher, -(-self._vocabulary // WORD))


class Matcher:
    """How far one answer is in its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        """`matcher`: an LLMatcher; `words`: of a mask."""
        self._matcher = matcher
        self._words = words
        self._read: list[int] = []  # tokens of the answer

    def allowed(self, answer: Sequence[int]) -> torch.Tensor:
        """Returns the tokens that may follow an answer, a bit each: int32[words]."""
        known = len(self._read)
        if list(answer[:known]) != self._read:  # it is computed again from an earlier token
            self._matcher.reset()
            known, self._read = 0, []
        new = list(answer[known:])
        self._matcher.consume_tokens(new)
        self._read += new
        mask: bytes = self._matcher.compute_bitmask()
        return torch.frombuffer(bytearray(mask), dtype=torch.int32)[: self._words]

    def copy(self) -> Self:
        """Returns the matcher of another answer, from its beginning on."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return type(self)(matcher, self._words)
