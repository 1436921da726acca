"""The table of docs/using.md: what the stock `openai` client asks for, asked of `ballonet serve` and of
`transformers serve --continuous-batching`, of the same folder. The table says what is seen."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import torch
from openai import APIError, APIStatusError, OpenAI
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from .. import programs
from ..models import build
from .scripted import END, saved_tokenizer
from .test_server import ENVIRONMENT, Serving, free_port

Probe = Callable[[OpenAI, str], bool]
MESSAGES: Final = [{"role": "user", "content": "hi"}]
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# What the model says where there are tools, a token each.
SAID: Final = ("<think>", "hm", "</think>", "<tool_call>", '\n{"name": "f", "arguments": {"a": 3}}\n', "</tool_call>")
NEARLY: Final = {str(token): 100 for token in range(40, 60)}  # biases: one of these, another once it is penalized
CHAT: Final = r"""{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if tools %}<think>{% endif %}"""
STOCK: Final = """
import sys
from transformers.cli.serve import Serve
Serve(continuous_batching=True, port=int(sys.argv[1]), device="cpu", cb_max_batch_tokens=64, cb_num_blocks=16)
"""


def saved(folder: Path) -> str:
    """A model that samples, as its generation config says. What it says is readable for the most part."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved_tokenizer(folder, CHAT))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SAID])
    tokenizer.save_pretrained(folder)
    chain = [*tokenizer.convert_tokens_to_ids([*SAID]), END]
    model = build("qwen3", vocab_size=len(tokenizer), hidden_size=256, max_position_embeddings=512)
    with torch.no_grad():
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        head[94:] = 0  # bytes that are no ASCII characters, and what is special
        for before, after in pairwise(chain):
            head[after] = 3 * embeddings[before] / embeddings[before].norm()
        for layer in model.model.layers:  # the last token decides for the most part
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
    model.generation_config.update(do_sample=True, temperature=1.0, eos_token_id=END, pad_token_id=0)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OpenAI]]:
    """Clients of both, which ask the first request: its settings are those of stock's loop."""
    served = Serving(tmp_path_factory.mktemp("served"), models=[folder])
    port, said = free_port(), Path(tempfile.mkdtemp(dir=tmp_path_factory.mktemp("stock")))
    stock = programs.Program(["-c", STOCK, str(port)], said, programs.ROOT, ENVIRONMENT | {"HF_HUB_OFFLINE": "1"})
    try:
        clients = {
            "ballonet": served.client(),
            "transformers": OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0),
        }
        while not is_listening(f"http://127.0.0.1:{port}/health"):
            assert stock.process.poll() is None, stock.err
            time.sleep(0.1)
        for client in clients.values():
            text(client, folder)
        yield clients
    finally:
        served.process.kill()
        stock.process.kill()


def is_listening(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.HTTPError:
        return False


def text(client: OpenAI, model: str, **more: Any) -> str:
    """A completion, greedily unless `more` says otherwise."""
    settings = {"prompt": "abc", "max_tokens": 16, "temperature": 0} | more
    return str(client.completions.create(model=model, **settings).choices[0].text)


def chat(client: OpenAI, model: str, **more: Any) -> Any:
    settings = {"messages": MESSAGES, "max_tokens": 32, "temperature": 0} | more
    return client.chat.completions.create(model=model, **settings).choices


def changes(setting: dict[str, Any], **more: Any) -> Probe:
    """Does a setting change what is said greedily?"""
    return lambda client, model: text(client, model, **setting, **more) != text(client, model, **more)


def narrows(**more: Any) -> Probe:
    """Is what is sampled the likeliest token, by a setting?"""
    hot = {"temperature": 2}

    def probe(client: OpenAI, model: str) -> bool:
        return text(client, model, **hot) != text(client, model) == text(client, model, **hot, **more)

    return probe


def seeded(client: OpenAI, model: str) -> bool:
    one, same, other = (text(client, model, temperature=2, seed=seed) for seed in (1, 1, 2))
    return one == same != other


def stopped(client: OpenAI, model: str) -> bool:
    whole = text(client, model)
    return text(client, model, stop=[whole[3:6]]) == whole[: whole.index(whole[3:6])]


def chosen(client: OpenAI, model: str) -> bool:
    choice = {"type": "function", "function": {"name": "f"}}
    plain = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}]
    call = chat(client, model, tools=plain, tool_choice=choice)[0].message.tool_calls[0]
    return bool(json.loads(call.function.arguments) == {})


def formed(client: OpenAI, model: str) -> bool:
    shape = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": ["x"]}}}
    return str(chat(client, model, response_format=shape)[0].message.content).strip() == '"x"'


def called(client: OpenAI, model: str) -> bool:
    (call,) = chat(client, model, tools=TOOLS)[0].message.tool_calls
    return bool(call.function.name == "f" and json.loads(call.function.arguments) == {"a": 3})


def thought(client: OpenAI, model: str) -> bool:
    return bool(chat(client, model, tools=TOOLS)[0].message.reasoning_content == "hm")


def told(client: OpenAI, model: str) -> bool:
    """Does a stream tell its usage where that is asked for, and only there?"""
    streams = [
        client.completions.create(model=model, prompt="abc", max_tokens=4, stream=True, **more)
        for more in ({"stream_options": {"include_usage": True}}, {})
    ]
    return [any(chunk.usage is not None for chunk in stream) for stream in streams] == [True, False]


def echoed(client: OpenAI, model: str) -> bool:
    made = client.completions.create(model=model, prompt="abc", max_tokens=1, echo=True, logprobs=1).choices[0]
    return made.logprobs is not None and len(made.logprobs.token_logprobs) == 4 and made.text.startswith("abc")


def respond(client: OpenAI, model: str, **more: Any) -> Any:
    return client.responses.create(model=model, input="hi", max_output_tokens=4, temperature=0, **more)


def coded(client: OpenAI, model: str) -> bool:
    """Do errors have OpenAI's codes, for a model that is not there and a prompt that is too long?"""
    codes = []
    for wrong in ({"model": "nobody/nothing"}, {"prompt": "a" * 2000}):
        try:
            text(client, **({"model": model} | wrong))
        except APIError as error:  # stock may close the connection
            codes.append(error.code)
    return codes == ["model_not_found", "context_length_exceeded"]


def has(path: str, method: str = "GET", **more: Any) -> Probe:
    """Is there such a route, whatever it says of this request?"""

    def probe(client: OpenAI, _: str) -> bool:
        url = str(client.base_url).removesuffix("/v1/") + path
        answer = httpx2.request(method, url, headers={"authorization": f"Bearer {client.api_key}"}, timeout=60, **more)
        return answer.status_code not in (404, 405)

    return probe


def keyed(client: OpenAI, _: str) -> bool:
    return httpx2.get(f"{client.base_url}models", headers={"authorization": "Bearer wrong"}).status_code == 401


def encrypted(client: OpenAI, _: str) -> bool:
    return is_listening(str(client.base_url).replace("http://", "https://").replace("/v1/", "/health"))


# By the words of the table.
PROBES: Final[Mapping[str, Probe]] = {
    "`temperature`": lambda client, model: text(client, model, temperature=2) != text(client, model),
    "`seed`": seeded,
    "`top_p`": narrows(top_p=1e-6),
    "`top_k`": narrows(extra_body={"top_k": 1}),
    "`min_p`": narrows(extra_body={"min_p": 1}),
    "`presence_penalty`": changes({"presence_penalty": 2}, logit_bias=NEARLY),
    "`frequency_penalty`": changes({"frequency_penalty": 2}, logit_bias=NEARLY),
    "`repetition_penalty`": changes({"extra_body": {"repetition_penalty": 0.05}}),  # of what the prompt has
    "`logit_bias`": lambda client, model: text(client, model, logit_bias={"40": 100}) == 16 * chr(40 + 33),
    "`max_tokens`": lambda client, model: len(text(client, model, max_tokens=5)) == 5,
    "`stop`": stopped,
    "`n`": lambda client, model: len(chat(client, model, n=2)) == 2,
    "`logprobs`": lambda client, model: chat(client, model, logprobs=True)[0].logprobs is not None,
    "`response_format`": formed,
    "`tool_choice`": chosen,
    "`stream_options`": told,
    "lists of prompts": lambda client, model: (
        len(client.completions.create(model=model, prompt=["a", "b"], max_tokens=1).choices) == 2
    ),
    "token ids": lambda client, model: text(client, model, prompt=[64, 65, 66]) == text(client, model),
    "`echo`": echoed,
    "tools": called,
    "reasoning": thought,
    "responses": lambda client, model: bool(respond(client, model, stream=False).output_text),
    "metrics": has("/metrics"),
    "keys": keyed,
    "OpenAI's codes of errors": coded,
    "transcriptions": has("/v1/audio/transcriptions", "POST"),
    "embeddings": has("/v1/embeddings", "POST", json={"input": "a", "model": "m"}),
    "fine-tuning": has("/v1/fine_tuning/jobs"),
    "files": has("/v1/files"),
    "batches": has("/v1/batches"),
    "stored responses": lambda client, model: has(f"/v1/responses/{respond(client, model, store=False).id}")(
        client, ""
    ),
    "TLS": encrypted,
}


def table() -> dict[str, tuple[str, str]]:
    """What the table says of each of `PROBES`: yes or no, of ballonet and of transformers."""
    page = (programs.ROOT / "docs" / "using.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", page.partition("| | ballonet | `transformers")[2], re.M)
    return {
        word: (re.split(r"\W", ours)[0], re.split(r"\W", stock)[0])
        for words, ours, stock in rows
        for word in words.split(", ")
    }


def test_the_table_says_what_both_servers_do(folder: str, servers: dict[str, OpenAI]) -> None:
    pytest.importorskip("llguidance")
    seen = {
        word: tuple(outcome(probe, client, folder) for client in servers.values()) for word, probe in PROBES.items()
    }
    said = {word: cells for word, cells in table().items() if word in PROBES}
    print("", *(f"{word:30} {ours:5} {stock}" for word, (ours, stock) in seen.items()), sep="\n")
    assert said == {word: tuple(answer.split()[0] for answer in cells) for word, cells in seen.items()}


def outcome(probe: Probe, client: OpenAI, model: str) -> str:
    """Is it honoured? no, with the status, where it is refused."""
    try:
        return "yes" if probe(client, model) else "no"
    except APIStatusError as error:
        return f"no ({error.status_code})"
    except (TypeError, AttributeError) as error:  # what was asked for is not in the answer
        return f"no ({error})"
