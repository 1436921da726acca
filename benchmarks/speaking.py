"""A model that says what it said before: the same requests in several ways, with the tokens that they should give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from generating import answer
from transformers import PreTrainedModel

from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.compat import cache_name

PROMPTS = ((1, 150), (1, 24), (4, 60), (6, 100))  # sequences and tokens
TOKENS = 16  # new ones
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


class Broken(Exception):
    """As it should."""


class Speaker:
    """A model, and what it said at first."""

    def __init__(self, name: str, model: PreTrainedModel, sizes: Sequence[tuple[int, int]], seed: int) -> None:
        """`model`: as stock has it; it may be managed afterwards. `sizes`: sequences and tokens of the prompts."""
        self.name = name
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.config.vocab_size
        prompts = [torch.randint(1, vocabulary, size, generator=generator) for size in sizes]
        self.prompts = [prompt.to(model.device) for prompt in prompts]
        self.tasks = [
            (number, way)
            for number, prompt in enumerate(self.prompts)
            for way in WAYS
            if way != "lookup" or prompt.shape[0] == 1
        ]
        self.expected = {task: self.say(*task) for task in self.tasks}

    def say(self, number: int, way: str) -> torch.Tensor:
        """The prompt of that number and what follows, int64[sequences, tokens], on the CPU."""
        found: torch.Tensor = self._generate(self.prompts[number], TOKENS, **WAYS[way]).sequences
        return found.cpu()

    def later(self, number: int, meanwhile: Callable[[], None]) -> torch.Tensor:
        """Greedy, in two halves, with something else between them while the cache lies idle."""
        begun = self._generate(self.prompts[number], TOKENS // 2)
        meanwhile()
        more, given = TOKENS - TOKENS // 2, {cache_name(self.model): given_cache(begun)}
        found: torch.Tensor = self._generate(begun.sequences, more, **given).sequences
        return found.cpu()

    def breaks_off(self, number: int, layer: int) -> None:
        """A request that raises in that layer, on this thread only."""
        thread = threading.get_ident()

        def fail(*_: object) -> None:
            if threading.get_ident() == thread:
                raise Broken

        handle = self.model.get_submodule(f"model.layers.{layer}").register_forward_pre_hook(fail)
        try:
            self.say(number, "greedy")
        except Broken:
            return
        finally:
            handle.remove()
        raise RuntimeError("a request that should have broken off did not")

    def _generate(self, prompt: torch.Tensor, tokens: int, **more: Any) -> Any:
        return answer(self.model, prompt, tokens, return_dict_in_generate=True, **more)
