"""`Session.send` with tokenizers and chat templates: turn by turn it says what stock says that holds the cache
by hand."""

from __future__ import annotations

import copy
import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

import ballonet

from .hub import made_model
from .pool import installing
from .test_examples import smollm2  # noqa: F401 (a fixture)

pytestmark = pytest.mark.chaos


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' . ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant :' }}{% endif %}"
)
SAID = ("Once upon a time 7 12", "a time 3", "upon 44 45 46", "Once 9")


class ByHand:
    """Stock, with a `DynamicCache` that is cut to what the next prompt has in common with what lies in it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = DynamicCache(config=model.config)
        self._held: list[int] = []
        self._messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.reused = 0

    def send(self, text: str, **options: Any) -> str:
        if self._tokenizer.chat_template is not None:
            self._messages.append({"role": "user", "content": text})
            given = self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, return_dict=True)
            prompt = list(given["input_ids"])
        else:
            prompt = self.tokens + self._tokenizer(text, add_special_tokens=not self.tokens)["input_ids"]
        pairs = zip(self._held, prompt[:-1], strict=False)
        self.reused = next(
            (n for n, (one, other) in enumerate(pairs) if one != other), min(len(self._held), len(prompt) - 1)
        )
        self._cache.crop(self.reused - self._cache.get_seq_length())
        ids = torch.tensor([prompt])
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=self._cache, **options)
        self.tokens = output[0].tolist()
        self._held = self.tokens[: self._cache.get_seq_length()]
        said: str = self._tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": said})
        return said


def talk(folder: Path, template: str | None, turns: tuple[str, ...], tokens: int) -> list[int]:
    """Both say the same with the same tokens; how many each turn did not compute."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template is not None:
        tokenizer.chat_template = template or None
    options = {"do_sample": False, "max_new_tokens": tokens}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.2, eos_token_id=None, **sizes))
    by_hand, reused = ByHand(copy.deepcopy(stock.eval()), tokenizer), []
    wanted = [(by_hand.send(text, **options), by_hand.tokens, by_hand.reused) for text in turns]
    with installing(2**26, 65536) as put:
        put()
        managed = ballonet.manage(stock, prefix_cache=True)
        with ballonet.Session(stock, tokenizer) as session:
            for text, (said, tokens_held, held) in zip(turns, wanted, strict=True):
                assert session.send(text, **options) == said
                assert list(session.tokens) == tokens_held
                assert session.reused == held
                reused.append(held)
        managed.release()
        del managed, session, stock
        gc.collect()
    return reused


@pytest.mark.parametrize("template", [TEMPLATE, ""])
def test_a_tokenizer_that_is_made_here(tmp_path: Path, template: str) -> None:
    reused = talk(made_model(tmp_path), template, SAID, 9)
    assert reused[0] == 0
    assert all(before < after for before, after in pairwise(reused))


def test_the_tokenizer_and_template_of_smollm2(smollm2: Path) -> None:  # noqa: F811
    reused = talk(smollm2, None, ("What is an airship?", "And a balloon?"), 8)
    assert reused[1] > 30
