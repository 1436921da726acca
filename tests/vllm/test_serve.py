"""`vllm serve` with the connector, as a user starts it and asks it over HTTP: the engine is in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIStatusError, OpenAI

from ..sharing import Watcher, held
from .engine import SIZES, TOKENS, prompts, transfer
from .running import MIB, NEEDS_VLLM, PAGE, PYTHON, UNDER, budget

pytestmark = NEEDS_VLLM

BUDGET = 16 * MIB


class Serving:
    """The server and the processes that it has started."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        sizes = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        options = transfer({"budget": BUDGET, "page_size": PAGE})
        command = [str(Path(PYTHON).with_name("vllm")), "serve", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *sizes]
        command += ["--kv-transfer-config", json.dumps(options)]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=UNDER)
        self.all = [self.process.pid]
        self.engine = 0

    def wait_ready(self) -> None:
        """Waits until it answers, and notes its processes."""
        deadline = time.monotonic() + UNDER
        while not self._answers():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        self.all += _descendants(self.process.pid)
        (self.engine,) = (pid for pid in self.all if held(pid))

    def _answers(self) -> bool:
        with suppress(APIConnectionError, APIStatusError):
            return bool(self.client.models.list().data)
        return False

    def said(self) -> str:
        """The end of what it has printed."""
        return self._log.read_text(errors="replace")[-6000:]

    def complete(self, prompt: list[int]) -> tuple[str, list[int]]:
        """The text and the tokens of an answer."""
        answer = self.client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        choice: Any = answer.choices[0]
        return choice.text, choice.token_ids


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One for all tests; what it started is ended with it."""
    server = Serving(model, tmp_path_factory.mktemp("served"))
    try:
        server.wait_ready()
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)  # its session is its own
        server.process.wait()


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for path in children for child in path.read_text().split()]
    return pids + [descendant for child in pids for descendant in _descendants(child)]


def runs(pid: int) -> bool:
    """Is it there, and has not ended? Nobody may have waited for it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(holds: Callable[[], bool], serving: Serving) -> None:
    """Waits for what must come."""
    deadline = time.monotonic() + UNDER
    while not holds():
        assert time.monotonic() < deadline, serving.said()
        time.sleep(0.01)


def test_clients_get_the_tokens_of_stock_and_pages_follow_them(serving: Serving, stock: Any) -> None:
    idle = held(serving.engine)
    with ThreadPoolExecutor(len(prompts()[0])) as threads:
        for asked, expected in zip(prompts(), stock, strict=True):
            with Watcher([serving.engine], BUDGET) as watcher:
                answers = list(threads.map(serving.complete, asked))
            assert [tokens for _, tokens in answers] == expected
            assert [text.split() for text, _ in answers] == [[f"w{token}" for token in tokens] for tokens in expected]
            assert not watcher.over
            assert watcher.together >= idle + 2 * MIB
            until(lambda: held(serving.engine) == idle, serving)  # nobody asks any more


def test_a_budget_that_is_lowered_while_clients_wait_only_slows_them(serving: Serving, stock: Any) -> None:
    asked = prompts()[0]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = [threads.submit(serving.complete, prompt) for prompt in asked]
        until(lambda: held(serving.engine) > 2 * MIB or answers[0].done(), serving)
        with Watcher([serving.engine], BUDGET) as watcher:
            assert budget(serving.engine, 2 * MIB)["budget"] == 2 * MIB
            watcher.total = 2 * MIB
            assert [answer.result()[1] for answer in answers] == stock[0]
    assert not watcher.over


def test_a_signal_leaves_no_process_and_no_page(serving: Serving) -> None:
    """The last of them: it ends the server, in the middle of requests. vLLM may end its engine before that has answered
    them, and waits for their clients to go then, however long: they do once the engine has ended."""
    idle = held(serving.engine)
    with ExitStack() as clients:
        for prompt in prompts()[0][:4]:
            clients.enter_context(asking(serving, prompt, 800))
        until(lambda: held(serving.engine) > idle, serving)
        serving.process.send_signal(signal.SIGTERM)
        until(lambda: not runs(serving.engine), serving)
    assert serving.process.wait(UNDER) == 0, serving.said()
    until(lambda: not any(map(runs, serving.all)), serving)
    assert not any(map(held, serving.all))


@contextmanager
def asking(serving: Serving, prompt: list[int], tokens: int) -> Iterator[None]:
    """A client that asks for so many tokens, and waits within it."""
    with closing(HTTPConnection(serving.url.removeprefix("http://"))) as client:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        client.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        yield
