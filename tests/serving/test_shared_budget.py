"""Two servers in two processes that share one budget: pages go to the one that is asked, the total changes while both
are, answers are stock's, and together they never hold more, as the kernel says from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

from ballonet.__main__ import main

from ..sharing import Watcher, share_in
from .test_server import Serving, by_stock

MIB = 2**20
TOTAL, LESS = 9 * MIB // 2, 4 * MIB  # one process under load needs more than half of it
ROUNDS = 50  # of requests, until pages have followed: it takes as many as there are in some seconds
TOKENS = 48  # of an answer: all requests of a round are in the batch together, however long the first has been there
PROMPTS = [" ".join(f"w{3 + (7 * first + n * n) % 80}" for n in range(300)) for first in range(4)]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Serving]]:
    """Both idle. They have ended well after it."""
    share_in(tmp_path, monkeypatch)
    started = list[Serving]()
    try:
        for share in (f"{TOTAL}", "on"):
            options = ("--shared-budget", share, "--batch-tokens", "32")
            started.append(Serving(tmp_path / str(len(started)), *options, layers=(4,), runtime=str(tmp_path)))
        yield started
        assert [server.end() for server in started] == [0, 0], [server.said() for server in started]
    finally:
        for server in started:
            server.process.kill()


def ask(client: OpenAI, model: str, prompt: str) -> str:
    """A completion, greedily."""
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, temperature=0)
    return answer.choices[0].text


def test_two_servers_share_one_budget(servers: Sequence[Serving], capsys: pytest.CaptureFixture[str]) -> None:
    stock = [by_stock(servers[0].models[0], prompt, TOKENS) for prompt in PROMPTS]
    asking = {server: partial(ask, server.client(), server.models[0]) for server in servers}

    def parts(*total: int) -> dict[int, int]:
        """Bytes of each process, after the total has changed."""
        assert main(["budget", "--shared", *map(str, total), "--json"]) == 0, capsys.readouterr().err
        (row,) = json.loads(capsys.readouterr().out)
        return {part["pid"]: part["part"] for part in row["parts"]}

    with (
        ThreadPoolExecutor(8 * len(PROMPTS)) as threads,
        Watcher([server.process.pid for server in servers], TOTAL) as watcher,
    ):

        def load(*chosen: Serving) -> None:
            """Many clients at once."""
            answers = [threads.map(asking[server], 4 * PROMPTS) for server in chosen]
            assert [list(answer) for answer in answers] == [4 * stock] * len(chosen)

        for server, other in (servers, servers[::-1]):
            for _ in range(ROUNDS):
                load(server)
                if (shares := parts())[server.process.pid] > TOTAL // 2:
                    break
            assert shares[server.process.pid] > TOTAL // 2 > shares[other.process.pid], "pages follow the load"
            assert server.figure('ballonet_shared_budget_bytes{what="total"') == TOTAL
        for total in (LESS, TOTAL):
            waiting = threads.submit(load, *servers)
            watcher.total = max(watcher.total, total)
            assert sum(parts(total).values()) <= total
            watcher.total = total
            waiting.result()
    assert watcher.looks
    assert not watcher.over, f"{watcher.together} bytes together"
    assert watcher.together > TOTAL // 2
