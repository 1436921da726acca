"""The server of `ballonet serve`, asked as OpenAI's clients ask, and the load generator."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    BadRequestError,
    OpenAI,
    UnprocessableEntityError,
)
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import control, devices
from ballonet.hooks.options import ManageOptions
from ballonet.hooks.server.application import Address
from ballonet.hooks.server.loading import source_of
from ballonet.hooks.server.rendering import answer_template
from ballonet.hooks.server.server import Server

from .. import programs
from ..dashboard import asked, expressions, labels, sample_names
from ..models import VOCABULARY, build
from ..pool import cache_of_its_own, take_out
from ..tuned import Tuned

KEY = "a key"
ENVIRONMENT = {**programs.environment(), "BALLONET_DEVICE": "cpu"}
TOKENS = 8
LONGEST = 512  # tokens of a sequence
# `ballonet` whose loops begin no step as long as there is a file, which goes as they are to end
HELD = """
import pathlib, sys, time
from dataclasses import replace
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from ballonet.__main__ import main
from ballonet.hooks.server import application
from ballonet.hooks.server.loops import Loop

held, step, tell = pathlib.Path(sys.argv[1]), ContinuousBatchProcessor._generation_step, Loop.tell

def waits(self, model):
    while held.exists():
        time.sleep(0.01)
    step(self, model)

def tells(self):
    tell(self)
    held.unlink(missing_ok=True)

ContinuousBatchProcessor._generation_step, Loop.tell = waits, tells
application.CLIENTS = replace(application.CLIENTS, told=600.0)
sys.exit(main(sys.argv[2:]))
"""


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Serving:
    """A server in a process of its own, of models with so many layers."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        layers: Sequence[int] = (2, 3, 4),
        longest: int = LONGEST,
        runtime: str | None = None,
        begin: Sequence[str] = ("-m", "ballonet"),
        models: Sequence[str] = (),
    ) -> None:
        """`runtime`: the folder of its control socket, None: that of the tests; `begin`: what is in place of the
        program; `models`: others."""
        self.models = [*models] or [saved(folder / f"{n} layers", n, longest, chat=n != 4) for n in layers]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        sizes = ("--budget", "24MiB", "--page-size", "64KiB", "--host-budget", "8MiB", "--block-size", "16")
        command = [*begin, "serve", *self.models, "--port", str(port), "--api-key", KEY, *sizes, *options]
        said = Path(tempfile.mkdtemp(dir=folder))
        more = {} if runtime is None else {"XDG_RUNTIME_DIR": runtime}
        self._program = programs.Program(command, said, programs.ROOT, ENVIRONMENT | more)
        self.process = self._program.process
        while "ready" not in self.said():
            assert self.process.poll() is None, self.said()
            time.sleep(0.01)

    def said(self) -> str:
        """What it has written so far."""
        return self._program.err

    def printed(self) -> str:
        """What it has printed so far."""
        return self._program.out

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def get(self, path: str, key: str | None = KEY, body: bytes | None = None) -> tuple[int, str]:
        """The status and the text of an answer."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def figure(self, name: str) -> float:
        """The sum of what `/metrics` has by a name."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def end(self, by: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal, and returns what it ends with."""
        self.process.send_signal(by)
        return self.ended()

    def ended(self) -> int:
        """Waits for its end, and returns what it ends with."""
        return self._program.ended().returncode


CHAT = """{% for each in messages %}{% if each.content == 'judge' %}{{ raise_exception('no judges here') }}{% endif %}
{{ each.content }} w9{% endfor %}"""


def words() -> Tokenizer:
    """Whole words."""
    tokenizer = Tokenizer(kinds.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def saved(folder: Path, layers: int, longest: int = LONGEST, *, chat: bool = False, name: str = "llama") -> str:
    """A tiny model with a tokenizer of whole words. `longest`: tokens of a sequence; `chat`: has it a chat template?"""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), unk_token="w1", pad_token="w0")
    tokenizer.chat_template = CHAT if chat else None
    tokenizer.save_pretrained(folder)
    build(name, num_hidden_layers=layers, max_position_embeddings=longest).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One for all tests, which ends well after all of them."""
    server = Serving(tmp_path_factory.mktemp("served"))
    try:
        yield server
        assert server.end() == 0, server.said()
    finally:
        server.process.kill()


def ask(client: OpenAI, model: str, first: int) -> str:
    """A completion, greedily."""
    return complete(client, model, " ".join(f"w{first + n}" for n in range(5)))


def complete(client: OpenAI, model: str, prompt: str, tokens: int = TOKENS) -> str:
    """A completion of a text, greedily."""
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=0)
    return answer.choices[0].text


def test_many_clients_of_two_models_get_what_one_gets(serving: Serving) -> None:
    client = serving.client()
    asked = [(model, first) for first in range(3, 15) for model in serving.models[:2]]
    alone = [ask(client, *request) for request in asked]
    assert len(set(alone)) > len(asked) / 2
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda each: ask(client, *each), asked)) == alone
    assert serving.figure("ballonet_requests{") == 0
    assert serving.figure("ballonet_batches_total") > 2 * TOKENS
    assert serving.figure("ballonet_created_bytes") <= serving.figure("ballonet_budget_bytes") == 24 * 2**20


def test_figures_are_scraped_while_two_models_serve(serving: Serving) -> None:
    """Each page is whole, counters never fall, and what requests took is counted once for each. The dashboard's names
    are all on the page, and `top` sees the same models."""
    client, before = serving.client(), samples(serving.get("/metrics")[1])
    asked_ = [(model, first) for first in range(3, 11) for model in serving.models[:2]]
    pages = [before]
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(ask, client, *request) for request in asked_]
        while not all(future.done() for future in waiting):
            pages.append(samples(serving.get("/metrics")[1]))
            assert sum(value for (name, _), value in pages[-1].items() if name == "ballonet_device_bytes") <= 24 * 2**20
        for future in waiting:
            future.result()

    def grown(name: str, model: str) -> float:
        key = name, frozenset({("model", model)})
        return pages[-1][key] - before.get(key, 0)

    deadline = time.monotonic() + 60
    while sum(grown("ballonet_ttft_seconds_count", model) for model in serving.models[:2]) < len(asked_):
        assert time.monotonic() < deadline  # an answer may be there a moment before its request has ended
        pages.append(samples(serving.get("/metrics")[1]))
    counted = [key for key in before if key[0].endswith(("_total", "_bucket", "_count", "_sum"))]
    for one, other in itertools.pairwise(pages):
        assert [key for key in counted if other[key] < one[key]] == []
    for model in serving.models[:2]:
        assert grown("ballonet_ttft_seconds_count", model) == len(asked_) / 2
        assert 0 < grown("ballonet_tpot_seconds_count", model) <= len(asked_) / 2, "those with more than one token"
        assert ("ballonet_requests", frozenset({("model", model), ("state", "running")})) in pages[-1]

    known = dict(sample_names(serving.get("/metrics")[1]))
    for expression in expressions():
        for name in asked(expression):
            label_sets = [set(sample.labels) for sample in known[name].samples if sample.name == name]
            assert all(labels(expression) - {"instance", "le"} <= label_set for label_set in label_sets), expression

    look = control.look(serving.process.pid)
    assert {listed["path"] for listed in look["models"]} == {*serving.models}
    assert len({listed["name"] for listed in look["models"]}) == len(serving.models)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values of a page of figures, by name and labels. Each is there once."""
    values = dict[tuple[str, frozenset[tuple[str, str]]], float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in values
            values[key] = sample.value
    return values


def test_a_server_goes_on_where_one_before_it_ended(tmp_path: Path) -> None:
    """A conversation's next turn computes what is new, and less than a block of the files, which has 256 tokens. The
    first server ends by Ctrl-C."""
    options = ("--json", "--prefix-dir", str(tmp_path / "prefixes"), "--batch-tokens", "128")
    said = " ".join(f"w{3 + n * n % 50}" for n in range(530))
    figures = list[float]()
    for turn in range(2):
        server = Serving(tmp_path, *options, layers=(2,), longest=1024)
        try:
            prompt = f"{said} w{7 + turn} w{9 + turn}"
            answer = server.client().completions.create(
                model=server.models[0], prompt=prompt, max_tokens=TOKENS, temperature=0
            )
            text = answer.choices[0].text
            assert text == by_stock(server.models[0], prompt)
            said = f"{prompt} {text}"
            figures.append(server.figure('ballonet_prompt_tokens_total{found="disk"'))
            ready = {"ready": True, "url": server.url, "models": server.models, "pid": server.process.pid}
            assert json.loads(server.printed()) == ready
            assert server.end((signal.SIGINT, signal.SIGTERM)[turn]) == 0, server.said()
            assert "Traceback" not in server.said(), server.said()
        finally:
            server.process.kill()
    assert figures == [0, 512]


def by_stock(folder: str, prompt: str, tokens: int = TOKENS) -> str:
    """The completion of transformers alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(ids, do_sample=False, max_new_tokens=tokens)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_wrong_request_is_refused_with_status_and_reason(serving: Serving) -> None:
    """The others are in test_api.py: this is what a loop, a template, or the way to another process says."""
    text: dict[str, Any] = {"model": serving.models[0], "prompt": "w3", "max_tokens": 4}
    chat: dict[str, Any] = {"model": serving.models[0], "messages": [{"role": "user", "content": "w3"}]}
    bare = {"model": serving.models[2], "input": "w3"}  # without a chat template; its loop has not begun
    judged = chat | {"messages": [{"role": "user", "content": "judge"}]}
    cases: list[tuple[str, str | None, Any, int, str]] = [
        ("completions", None, text, 401, "API key"),
        ("completions", "another key", text, 401, "API key"),
        ("completions", KEY, b'{"model": ', 400, "no JSON"),
        ("completions", KEY, text | {"model": "gpt-5"}, 404, serving.models[1]),
        ("completions", KEY, {"prompt": "w3"}, 400, "model"),
        ("completions", KEY, text | {"prompt": ""}, 400, "no tokens"),
        ("completions", KEY, text | {"max_tokens": "many"}, 400, "max_tokens"),
        ("completions", KEY, text | {"max_tokens": LONGEST}, 400, f"has 1 tokens and asks for {LONGEST} more"),
        ("completions", KEY, text | {"structured_outputs": {"regex": "a["}}, 400, ""),
        ("chat/completions", KEY, chat | {"model": serving.models[2]}, 400, "no chat template"),
        ("chat/completions", KEY, judged, 400, "no judges here"),
        ("responses", KEY, bare, 400, "no chat template"),
        ("audio/transcriptions", KEY, {}, 404, "Not Found"),
    ]
    for path, key, sent, status, says in cases:
        response = serving.get(f"/v1/{path}", key, sent if isinstance(sent, bytes) else json.dumps(sent).encode())
        assert response[0] == status, (path, sent, response)
        assert says in json.loads(response[1])["error"]["message"], (path, sent, response)
    assert serving.get("/load_model", KEY, b"{}")[0] == 404
    assert serving.get("/health", None)[0] == 200
    assert serving.get("/metrics", None)[0] == 401
    assert "Traceback" not in serving.said()


def test_body_without_a_type_of_content_is_checked(serving: Serving) -> None:
    """Without a type of content the body reaches transformers' handlers, which would load what it names."""
    with socket.create_connection(("127.0.0.1", int(serving.url.rpartition(":")[2]))) as link:
        sent = b'{"model": "gpt-5", "prompt": "w3"}'
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer ")
        link.sendall(f"{KEY}\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
        assert b" 404 " in link.makefile("rb").readline()


def test_the_models_are_listed(serving: Serving) -> None:
    assert [model.id for model in serving.client().models.list()] == sorted(serving.models)
    assert serving.get("/v1/models", None)[0] == 401


def test_chats_and_responses_say_what_completions_say(serving: Serving) -> None:
    """At once, or in pieces."""
    client, model = serving.client(), serving.models[0]
    text = client.completions.create(model=model, prompt="w3 w4 w9", max_tokens=TOKENS, temperature=0).choices[0].text
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "w3 w4"}], "temperature": 0}
    whole = client.chat.completions.create(**chat, max_tokens=TOKENS)
    pieces = list(client.chat.completions.create(**chat, max_completion_tokens=TOKENS, stream=True))
    assert whole.choices[0].message.content == text
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "length"
    asked: dict[str, Any] = {"model": model, "input": "w3 w4", "temperature": 0, "max_output_tokens": TOKENS}
    assert client.responses.create(**asked, stream=False).output_text == text
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_loading_a_model_imports_what_divides_its_answers(tmp_path: Path) -> None:
    source = source_of(saved(tmp_path, 2), own_templates=False)
    imported = answer_template.cache_info().misses
    answer_template(source)
    assert answer_template.cache_info().misses == imported


def test_a_recorded_load(serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 20 * n, "input_length": 600 + n, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(10)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ("--lengths", "0.1", "--limit", "8", "--ttft-slo", "600s", "--api-key", KEY)
    assert main(["load", str(trace), "--url", serving.url, "--model", serving.models[1], *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == [
        *("requests", "failed", "refused", "tokens", "seconds", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99"),
        *("tokens_per_second", "kept", "goodput"),
    ]
    assert (said["requests"], said["failed"], said["refused"]) == (8, 0, 0)
    assert 0 < said["ttft_p50"] <= said["ttft_p99"] <= said["seconds"]
    assert said["goodput"] == pytest.approx(8 / said["seconds"], rel=0.01)


def test_a_load_asks_for_slos(serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(12):  # so that it is known what steps take
        ask(serving.client(), serving.models[1], 3 + n)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 60, "output_length": 5, "hash_ids": [0]}\n' * 3)
    command = ["load", str(trace), "--url", serving.url, "--model", serving.models[1], "--api-key", KEY]
    for options, failed in ((("--tpot-slo", "1us"), 0), (("--tpot-slo", "1us", "--ask"), 3), (("--ask",), 0)):
        assert main([*command, *options, "--json"]) == (1 if failed else 0)
        printed = capsys.readouterr()
        said = json.loads(printed.out)
        assert (said["failed"], said["refused"]) == (failed, failed)
        assert ("tpot of 1e-06 s cannot be kept" in printed.err) == (failed > 0)


@pytest.mark.parametrize(("grace", "tokens"), [("300s", 50), ("100ms", 400)])
def test_a_server_that_is_ended_under_load(grace: str, tokens: int, tmp_path: Path) -> None:
    """Requests are answered, or told after a while. There are no host pages."""
    drawn = ("--timeline", str(tmp_path / "drawn.json"))
    options, held = ("--grace", grace, "--host-budget", "0", "--batch-tokens", "64", *drawn), tmp_path / "held"
    server = Serving(tmp_path, *options, layers=(2,), begin=("-c", HELD, str(held)))
    client, model = server.client(), server.models[0]
    assert ask(client, model, 3)
    held.touch()

    def stream(first: int) -> str:
        reason = ""
        asked = client.completions.create(
            model=model, prompt=f"w{first} w4", max_tokens=tokens, temperature=0, stream=True
        )
        for chunk in asked:
            reason = chunk.choices[0].finish_reason or ""
        return reason

    def wait(first: int) -> str:
        answer = client.completions.create(model=model, prompt=f"w{first} w4", max_tokens=tokens, temperature=0)
        return answer.choices[0].finish_reason

    def told(act: Callable[[int], str], first: int) -> str:
        try:
            return act(first)
        except APIStatusError as error:
            return f"{error.status_code} {error}"
        except APIError as error:
            return f"stream {error.body}"

    try:
        with ThreadPoolExecutor(12) as threads:
            asked = [threads.submit(told, (stream, wait)[n % 2], 3 + n) for n in range(12)]
            while server.figure("ballonet_requests{") < 12:
                assert not any(call.done() for call in asked), [call.result() for call in asked if call.done()]
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            if tokens == 50:
                held.unlink()  # else once they are told
            assert server.ended() == 0, server.said()
            texts = [call.result() for call in asked]
    finally:
        server.process.kill()
    if tokens == 50:
        assert texts == ["length"] * 12
    else:
        assert all(text.startswith(("503", "stream")) and "the server shuts down" in text for text in texts), texts
    assert "Traceback" not in server.said(), server.said()
    events = json.loads((tmp_path / "drawn.json").read_text())["traceEvents"]
    drawn_requests = [
        event["args"] for event in events if event["ph"] == "b" and event["name"] == event["args"].get("name")
    ]
    ends = [request["end"] for request in drawn_requests]
    assert ends[0] == "finished"
    assert set(ends[1:]) == {"finished" if tokens == 50 else "failed"}
    assert len(ends) == 13 if tokens == 50 else len(ends) <= 13, "the loop ends before it sees all of them"
    assert {request["loop"] for request in drawn_requests} == {"2 layers"}


@pytest.mark.parametrize(
    ("name", "why"),
    [("llama", "cannot be loaded"), ("bloom", "is a BloomForCausalLM, which transformers cannot batch continuously")],
)
def test_a_model_that_cannot_be_served_ends_the_server_with_its_name(name: str, why: str, tmp_path: Path) -> None:
    good, bad = saved(tmp_path / "good", 2), saved(tmp_path / "bad", 2, name=name)
    if name == "llama":
        (tmp_path / "bad" / "model.safetensors").write_bytes(b"no weights")
    sizes = ["--budget", "24MiB", "--page-size", "64KiB"]
    command = ["-m", "ballonet", "serve", good, bad, "--port", str(free_port()), *sizes]
    done = programs.python(*command, variables=ENVIRONMENT)
    assert done.returncode == 1
    assert "ready" not in done.stderr
    assert f"{bad} {why}" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


def test_server_on_all_addresses_without_a_key_is_refused(tmp_path: Path) -> None:
    done = programs.python("-m", "ballonet", "serve", str(tmp_path), "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "--api-key" in done.stderr


def test_an_slo_comes_with_a_request(serving: Serving) -> None:
    """An SLO is accepted, or refused with the nearest that can be kept."""
    client, model = serving.client(), serving.models[0]
    for n in range(12):  # so that it is known what steps take
        ask(client, model, 3 + n)
    with pytest.raises(UnprocessableEntityError, match=r"tpot of 1e-06 s cannot be kept; the nearest"):
        client.completions.create(model=model, prompt="w3", max_tokens=8, extra_headers={"x-tpot-slo": "1us"})
    with pytest.raises(UnprocessableEntityError, match=r"ttft of 1e-06 s cannot be kept"):
        client.completions.create(model=model, prompt="w3", max_tokens=8, extra_headers={"x-ttft-slo": "1us"})
    with pytest.raises(BadRequestError, match="x-tpot-slo"):
        client.completions.create(model=model, prompt="w3", max_tokens=8, extra_headers={"x-tpot-slo": "soon"})
    kept = {"x-tpot-slo": "60s", "x-ttft-slo": "600s"}
    assert client.completions.create(model=model, prompt="w3", max_tokens=8, extra_headers=kept).choices[0].text


@pytest.mark.parametrize(("count", "host_pages", "records"), [(1, True, 0), (2, True, 2), (2, False, 0)])
def test_models_that_have_not_run_are_measured(
    count: int, host_pages: bool, records: int, tmp_path: Path, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one can give is known while another is asked; alone it gives to nobody, and without host pages it is
    served all the same."""
    tuned(weights={"large": 2**11}, serving={"measured": (1, 64, 1.0)})
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    monkeypatch.setenv("BALLONET_HOST_PAGES", str(int(host_pages)))
    ballonet.install("24MiB", page_size="64KiB", host_budget="8MiB", device="cpu")
    names = [saved(tmp_path / str(layers), layers) for layers in (4, 5)[:count]]
    try:
        with (
            nullcontext() if host_pages else pytest.warns(RuntimeWarning, match="while it is idle is assumed: the link")
        ):
            Server(names, devices.require(), ManageOptions(), Address(), lambda line: None).close()
        assert len(list(tmp_path.glob("cache/**/*.json"))) == records
    finally:
        take_out()


def test_a_program_that_starts_transformers_server_serves_on_the_pool(tmp_path: Path) -> None:
    """Nothing of it is changed: `transformers serve --continuous-batching`, under `ballonet run`."""
    model = saved(tmp_path / "model", 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = """
        import sys, ballonet
        from transformers.cli.serve import Serve
        try:
            Serve(sys.argv[1], continuous_batching=True, port=int(sys.argv[2]), device="cpu", cb_max_batch_tokens=64)
        except KeyboardInterrupt:
            pass
        print("elastic" if ballonet.stats().pages.weights > 0 else "stock")
    """
    command = ["-m", "ballonet", "run", "--budget", "24MiB", "-c", textwrap.dedent(program), model, port]
    said = Path(tempfile.mkdtemp(dir=tmp_path))
    running = programs.Program(command, said, programs.ROOT, ENVIRONMENT | {"BALLONET_PAGE_SIZE": "64KiB"})
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        while True:
            assert running.process.poll() is None, running.err
            try:
                text = ask(client, model, 3)
                break
            except APIConnectionError:
                time.sleep(0.1)
        assert text == by_stock(model, "w3 w4 w5 w6 w7")
        running.process.send_signal(signal.SIGINT)
        while not {"elastic", "stock"} & set(running.out.split()):
            assert running.process.poll() is None, running.err
            time.sleep(0.1)
        assert "elastic" in running.out.split()
    finally:
        running.process.kill()  # transformers leaves the thread of its loop running
