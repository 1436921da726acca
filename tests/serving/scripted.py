"""A server whose engine answers by a script, and a tokenizer whose tokens are bytes: for tests of endpoints."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from ballonet.hooks.sampling.settings import ChosenToken
from ballonet.hooks.server.application import Address, Application
from ballonet.hooks.server.doors import Doors
from ballonet.hooks.server.engine import Denial, Generation, Update
from ballonet.hooks.server.rendering import Rendered, RenderJob, Source, render
from ballonet.hooks.server.requests import Defaults
from ballonet.hooks.server.served import Models, ServedModel

SPECIAL = ("<|im_start|>", "<|im_end|>")
END = 257  # <|im_end|>
LONGEST = 4096
NAME = "org/model"
# As Qwen's: system, tools, thoughts and calls of tools
CHAT = r"""{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}{% if message.role == 'judge' or 'no judges' in message.content %}
{{- raise_exception('no judges here') }}{% endif %}<|im_start|>{{ message.role }}
{%- if message.name %} {{ message.name }}{% endif %}{{ '\n' + message.content }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}<|im_end|>
{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }} {% endif %}{{ mood }}<|im_start|>assistant
{% if thinking %}<think>{% endif %}"""


def saved_tokenizer(folder: Path, chat: str | None = CHAT) -> str:
    """Saves the tokenizer: a token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(kinds.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1])
    fast.chat_template = chat
    fast.save_pretrained(folder)
    return str(folder)


@dataclass
class Scripted:
    """An Engine. `script`: what it answers to a request, as texts or tokens, each an update; a Denial is raised. It
    ends after them as at a token that ends, or earlier by the length. `asked`: requests; `closed`: those left early."""

    tokenizer: Any
    script: Callable[[Generation], Sequence[str | int | Denial]] = lambda _: ["hello ", "world"]
    asked: list[Generation] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    answers: bool = True
    waiting: int = 0
    asleep: int = 0
    slept: list[tuple[int, float | None]] = field(default_factory=list)  # levels and timeouts that were asked for
    refusal: Denial | None = None  # to sleep

    async def generate(self, generation: Generation) -> AsyncGenerator[Update, None]:
        """Answers by the script."""
        self.asked.append(generation)
        left, over = generation.most, False
        ends = [END] if END in generation.ends else []
        try:
            for step in (*self.script(generation), *ends):
                if isinstance(step, Denial):
                    raise step
                tokens = self.tokenizer.encode(step, add_special_tokens=False) if isinstance(step, str) else [step]
                tokens = tokens[:left]
                left -= len(tokens)
                ended = "stop" if tokens[-1] in generation.ends else None if left else "length"
                over = ended is not None
                yield Update(tuple(chosen(generation, token) for token in tokens), ended)
                if over:
                    return
            over = True
            yield Update((), "stop")  # as at the end of a grammar
        finally:
            if not over:
                self.closed.append(generation.name)

    async def score(self, generation: Generation) -> tuple[ChosenToken, ...]:
        """Scores by `chosen`."""
        first, *rest = generation.prompt
        return ChosenToken(first), *(chosen(generation, token) for token in rest)

    def sleep(self, level: int, timeout: float | None) -> None:
        """Sleeps, unless there is a refusal."""
        self.slept.append((level, timeout))
        if self.refusal is not None:
            raise self.refusal
        self.asleep = level

    def wake(self) -> None:
        """Wakes."""
        self.asleep = 0

    def tell(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def chosen(generation: Generation, token: int) -> ChosenToken:
    """A token whose logprob follows from it, and from the seed; the next ones are less likely."""
    if (count := generation.sampling.logprobs) is None:
        return ChosenToken(token)
    logprob = -(token + 1) / 256 - generation.sampling.seed % 97
    return ChosenToken(token, logprob, tuple(((token + n) % 256, logprob - n) for n in range(count)))


async def in_a_thread(source: Source, job: RenderJob) -> Rendered:
    """Does a job; servers have processes for it."""
    return await asyncio.to_thread(render, *pickle.loads(pickle.dumps((source, job))))


class Scene:
    """A server in a thread, of one model, with an engine by a script."""

    def __init__(self, folder: Path, *, chat: str | None = CHAT, family: str = "qwen3", **more: Any) -> None:
        """`more`: of its `ServedModel`."""
        source = Source(saved_tokenizer(folder, chat), family=family, own_templates=more.pop("own_templates", False))
        self.engine = Scripted(PreTrainedTokenizerFast.from_pretrained(source.name))
        settings = {"longest": LONGEST, "vocabulary": 258, "ends": (END,), "defaults": Defaults()} | more
        self.served = ServedModel(NAME, self.engine, source, in_a_thread, **settings)
        self.key = "a key"
        self.app = Application(Models([self.served]), Address(doors=Doors(self.key)), lambda line: None).app
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.app, log_level="critical"))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [listening]})
        self._thread.start()
        self.http = httpx2.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=60)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def says(self, *steps: str | int | Denial) -> None:
        """Changes the script, and forgets what was asked."""
        self.engine.script = lambda _: steps
        self.engine.asked.clear()
        self.engine.closed.clear()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer."""
        answer = self.http.post(f"/v1/{path}", json={"model": NAME, **body}, headers=headers)
        return answer.status_code, answer.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Returns the events of a stream, which ends as OpenAI's do."""
        answer = self.http.post(f"/v1/{path}", json={"model": NAME, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return str(self.engine.tokenizer.decode(self.engine.asked[-1].prompt))

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits for what another thread does."""
        while not holds():
            time.sleep(0.001)

    def end(self) -> None:
        """Ends the server."""
        self.http.close()
        self.openai.close()
        self._uvicorn.should_exit = True
        self._thread.join()
