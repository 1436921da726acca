"""A server in a process of its own, tried as one would try somebody else's: by clients that are idle, slow, hostile,
random or many, while others ask, and compare. With BALLONET_SOAK, the form that takes longer, it goes on for so many
seconds with a thousand clients in each round, and says in a table what was seen. Times are figures: nothing here
depends on them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIError, APIStatusError, BadRequestError
from rich.console import Console
from rich.table import Table

from ballonet.hooks.server.connections import ClientLimits, raise_files

from .fuzz import fuzz
from .test_clients import CLIENTS, SEED, check, come, request
from .test_doors import CHATS, HOSTILE, LOOP, USER, connect, head, read_end
from .test_server import KEY, Serving, ask, by_stock

SECONDS = float(os.environ.get("BALLONET_SOAK", "0"))
IDLE = 3000  # connections
SLOW = 20  # clients that read slowly, and as many that write slowly
TOKENS = 100  # of answers that are read slowly
WORDS = 7_000_000 if SECONDS else 100_000  # of a prompt: 21 MB
KNOWN = range(3, 15)  # first words of prompts whose answers are known
PATIENCE = 600.0  # seconds: only what hangs takes them
# Asks for a server's health all the time, and says for each line that it reads how long that took at most
PINGER = r"""
import select, socket, sys, time
link, worst = None, 0.0
while True:
    began = time.monotonic()
    answer = b""
    while not answer.endswith(b"}"):
        if not answer:
            link = link or socket.create_connection(("127.0.0.1", int(sys.argv[1])))
            link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        part = link.recv(2**16)
        answer, link = (answer + part, link) if part else (b"", None)
    worst = max(worst, time.monotonic() - began)
    if select.select([sys.stdin], [], [], 0.005)[0]:
        if not sys.stdin.readline():
            break
        print(worst, flush=True)
        worst = 0.0
"""


class Others:
    """Clients that ask what is known, as long as it is open. `seen`: what became of it."""

    def __init__(self, server: Serving, known: dict[int, str]) -> None:
        self.seen = Counter[str]()
        self._server = server
        self._known = known
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[SEED + number]) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait(self, count: int = 4) -> None:
        """Waits until so many more were answered."""
        enough = self.seen["answered"] + count
        began = time.monotonic()
        while self.seen["answered"] < enough:
            assert time.monotonic() < began + PATIENCE, f"nobody is answered: {self.seen}"
            time.sleep(0.01)

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        with self._server.client() as client:
            while not self._ended.is_set():
                first = draw.choice(list(self._known))
                try:
                    text = ask(client.with_options(timeout=PATIENCE), self._server.models[0], first)
                    self.seen["answered" if text == self._known[first] else "wrong"] += 1
                except APIStatusError as error:
                    self.seen[str(error.status_code)] += 1
                except APIConnectionError as error:
                    self.seen[f"lost: {error.__cause__!r}"] += 1


class Ordeal:
    """A server, and what is seen of it. `known`: answers by the first word of a prompt, of stock; `failures`: what did
    not hold."""

    def __init__(self, folder: Path) -> None:
        options = ("--max-body", "64MiB", "--allow-client-templates", "--waiting", "100")
        self.server = Serving(folder, *options, layers=(2,))
        self.model = self.server.models[0]
        self.port = int(self.server.url.rpartition(":")[2])
        known = {first: by_stock(self.model, " ".join(f"w{first + n}" for n in range(5))) for first in KNOWN}
        self.others = Others(self.server, known)
        self.failures: list[str] = []
        self.table = Table("part", "what was seen", "/health took at most, ms", title="a server's ordeal")
        self._pinger = subprocess.Popen(
            [sys.executable, "-S", "-c", PINGER, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def close(self) -> None:
        self.others.close()
        self.stop_pinging()
        self.server.process.kill()

    def stop_pinging(self) -> None:
        self._pinger.communicate()

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[object], None]]:
        """Within it something is done to the server; gives what notes the figures of it."""
        figures: list[str] = []
        self._slowest()
        yield lambda figure: figures.append(str(figure))
        self.note(name, ", ".join(figures), f"{1e3 * self._slowest():,.0f}")

    def note(self, name: str, figures: str, slowest: str = "") -> None:
        """Adds a row to the table, and says it."""
        self.table.add_row(name, figures, slowest)
        if SECONDS:
            print(f"{name}: {figures}; /health {slowest or '-'} ms", flush=True)

    def expect(self, holds: bool, what: object) -> None:
        """Notes what does not hold."""
        if not holds:
            self.failures.append(str(what))

    def post(self, path: str, body: dict[str, Any], *headers: str) -> socket.socket:
        """A client that has asked."""
        content = json.dumps({"model": self.model, **body}).encode()
        key, length = f"Authorization: Bearer {KEY}", f"Content-Length: {len(content)}"
        return connect(self.port, head(path, key, length, "Connection: close", method="POST") + content)

    def peak(self, act: Callable[[], object]) -> int:
        """Bytes that the server's process has at most while something is done, above what it had before."""
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")
        before = self._memory("VmRSS")
        act()
        return self._memory("VmHWM") - before

    def held(self) -> dict[str, int]:
        """What the server's process has: sockets, threads, requests, and processes beyond those that render, each of
        which has a socket, too. Its pages are also those of beginnings that are kept: test_clients.py counts them."""
        process = self.server.process.pid
        links = [read_link(path) for path in Path(f"/proc/{process}/fd").iterdir()]
        processes = len(descendants(process))
        return {
            "sockets": sum(link.startswith("socket:") for link in links) - processes,
            "threads": len(os.listdir(f"/proc/{process}/task")),
            "processes": max(0, processes - 1 - ClientLimits().renderers),
            "requests": int(self.server.figure("ballonet_requests{")),
        }

    def _memory(self, name: str) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        assert match is not None
        return int(match[1]) * 1024

    def _slowest(self) -> float:
        """Seconds that an answer to /health took at most since the last call."""
        assert self._pinger.stdin is not None
        assert self._pinger.stdout is not None
        self._pinger.stdin.write(b"\n")
        self._pinger.stdin.flush()
        return float(self._pinger.stdout.readline())


def descendants(process: int) -> set[int]:
    """The processes that run and were started by one, and by those."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if state not in "ZX":
                parents[int(path.parent.name)] = int(parent)
    known = {process}
    while more := {child for child, parent in parents.items() if parent in known} - known:
        known |= more
    return known - {process}


def read_link(path: Path) -> str:
    """Where a link leads, empty if it has gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


@pytest.fixture
def ordeal(tmp_path: Path) -> Iterator[Ordeal]:
    made = Ordeal(tmp_path)
    try:
        made.others.wait()
        yield made
    finally:
        made.close()
        if SECONDS:
            Console(width=150).print(made.table)


def test_a_server_holds_whatever_clients_do(ordeal: Ordeal) -> None:
    draw, end, before = random.Random(SEED), time.monotonic() + SECONDS, dict[str, int]()
    start_threads(ordeal, draw)
    while True:
        leave_alone(ordeal)
        before = before or settled(ordeal, {})
        hold_idle_connections(ordeal)
        meet_slow_clients(ordeal)
        meet_random_clients(ordeal, draw, CLIENTS)
        refuse_hostile_requests(ordeal)
        take_large_bodies(ordeal)
        fuzz_with_a_seed(ordeal, draw)
        if time.monotonic() >= end:
            break
    with ordeal.part("what is left") as note:
        after = settled(ordeal, before)
        note({name: count - before[name] for name, count in after.items()})
        ordeal.expect(after == before, f"left: {before} became {after}")
    end_under_load(ordeal)
    ordeal.note("the others", str(dict(ordeal.others.seen)))
    ordeal.expect(not ordeal.others.seen["wrong"], f"wrong answers: {ordeal.others.seen}")
    assert not ordeal.failures


def start_threads(ordeal: Ordeal, draw: random.Random) -> None:
    """Asks for what starts threads that the server keeps: those of asyncio, of tokenizers for the texts of single
    tokens, and the one that compiles grammars."""
    come(ordeal.port, ordeal.model, 60, draw)
    asked: dict[str, Any] = {"model": ordeal.model, "prompt": "w3 w4", "max_tokens": 2}
    with ordeal.server.client() as client:
        client.completions.create(**asked, logprobs=1, echo=True)
        with suppress(BadRequestError):  # its tokens are no text of JSON
            client.completions.create(**asked, extra_body={"response_format": {"type": "json_object"}})


def leave_alone(ordeal: Ordeal) -> None:
    """The baseline: nobody but the others asks."""
    with ordeal.part("nothing"):
        time.sleep(min(10.0, SECONDS / 20))
        ordeal.others.wait()


def hold_idle_connections(ordeal: Ordeal) -> None:
    with ordeal.part("idle connections") as note:
        said = (b"", b"GET /hea", head("/health"))
        idle = [connect(ordeal.port, said[number % 3]) for number in range(min(IDLE, raise_files() // 2))]
        ordeal.others.wait()
        note(f"{len(idle):,}")
        for client in idle:
            client.close()


def meet_slow_clients(ordeal: Ordeal) -> None:
    """Slow clients are answered, too."""
    asked, short = (
        request(ordeal.model, tokens, stream=stream).replace(b"Host:", b"Connection: close\r\nHost:")
        for tokens, stream in ((TOKENS, True), (2, False))
    )
    with ordeal.part("slow clients") as note:
        readers = [connect(ordeal.port, asked, room=4096) for _ in range(SLOW)]
        writers = [connect(ordeal.port) for _ in range(SLOW)]
        for place in range(len(short)):
            for writer in writers:
                writer.send(short[place : place + 1])
            if not place % 100:
                ordeal.others.wait(1)
        statuses = Counter(read_end(writer).split(b" ", 2)[1].decode() for writer in writers)
        ended = sum(b"data: [DONE]" in read_end(reader) for reader in readers)
        note(f"{SLOW} writers: {dict(statuses)}; {SLOW} readers: {ended} read all")
        ordeal.expect(statuses == {"200": SLOW} and ended == SLOW, f"slow clients: {statuses}, {ended}")


def meet_random_clients(ordeal: Ordeal, draw: random.Random, count: int) -> None:
    with ordeal.part(f"{count:,} random clients") as note:
        outcomes = come(ordeal.port, ordeal.model, count, draw)
        note(dict(sorted(outcomes.items())))
        check(outcomes, count)


def refuse_hostile_requests(ordeal: Ordeal) -> None:
    looping = [(CHATS, {"messages": [USER], "chat_template": LOOP}, "longer")] if SECONDS else []
    for path, body, says in HOSTILE + looping:
        with ordeal.part(f"{path} with {', '.join(body)}: {says}") as note:
            status = int(read_end(ordeal.post(path, body)).split(b" ", 2)[1])
            note(status)
            ordeal.expect(status == 400, f"{path} {says}: {status}")


def take_large_bodies(ordeal: Ordeal) -> None:
    body = json.dumps({"model": ordeal.model, "prompt": "w3 " * WORDS}).encode()
    key = f"Authorization: Bearer {KEY}"
    ways = {
        "at once": (f"Content-Length: {len(body)}", body),
        "in chunks": ("Transfer-Encoding: chunked", b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"),
    }
    for way, (header, sent) in ways.items():
        with ordeal.part(f"{len(body) / 1e6:.0f} MB {way}") as note:
            answers: list[bytes] = []
            asked = head("/v1/completions", key, header, "Connection: close", method="POST") + sent
            grown = ordeal.peak(lambda: answers.append(read_end(connect(ordeal.port, asked))))  # noqa: B023
            status = int(answers[0].split(b" ", 2)[1])
            note(f"{status}, {grown / 2**20:,.0f} MiB more")
            ordeal.expect(status == 400, f"a large body {way}: {status}")


def fuzz_with_a_seed(ordeal: Ordeal, draw: random.Random) -> None:
    """In the form that takes longer; test_fuzz.py has the other."""
    if SECONDS and find_spec("schemathesis"):
        with ordeal.part("schemathesis") as note:
            note(dict(fuzz(ordeal.server.url, KEY, ordeal.model, 100, draw.randrange(2**32))))


def settled(ordeal: Ordeal, known: dict[str, int]) -> dict[str, int]:
    """What the server has once that is what is known, or changes no more; the others wait meanwhile."""
    ordeal.others.close()
    began, last, since = time.monotonic(), dict[str, int](), time.monotonic()
    while time.monotonic() < began + PATIENCE:
        now = ordeal.held()
        if now == known:
            break
        if now != last:
            last, since = now, time.monotonic()
        if not known and not now["requests"] and time.monotonic() > since + 1:
            break
        time.sleep(0.05)
    seen = ordeal.others.seen
    ordeal.others = Others(ordeal.server, ordeal.others._known)
    ordeal.others.seen = seen
    return now


def end_under_load(ordeal: Ordeal) -> None:
    """Each request is finished, or told."""
    ordeal.others.close()
    ordeal.stop_pinging()

    def act(number: int) -> str:
        with ordeal.server.client() as client:
            try:
                asked: dict[str, Any] = {"model": ordeal.model, "prompt": f"w{number} w4", "max_tokens": TOKENS}
                if number % 2:
                    return str(client.completions.create(**asked).choices[0].finish_reason)
                return str(
                    [chunk.choices[0].finish_reason for chunk in client.completions.create(**asked, stream=True)][-1]
                )
            except APIStatusError as error:
                return f"told: {error.status_code}"
            except APIError as error:
                return f"told: {error}" if "shuts down" in str(error.body) else f"lost: {error!r}"

    with ThreadPoolExecutor(24) as threads:
        asked = [threads.submit(act, 3 + number) for number in range(24)]
        while ordeal.server.figure("ballonet_requests{") + sum(call.done() for call in asked) < 24:
            time.sleep(0.01)
        ordeal.server.process.send_signal(signal.SIGTERM)
        ends = Counter(call.result() for call in asked)
    status = ordeal.server.ended()
    ordeal.note("SIGTERM under load", f"{dict(ends)}, exit status {status}")
    ordeal.expect(status == 0, ordeal.server.said()[-2000:])
    ordeal.expect("Traceback" not in ordeal.server.said(), ordeal.server.said()[-2000:])
    ordeal.expect(not any(end.startswith("lost") for end in ends), ends)
