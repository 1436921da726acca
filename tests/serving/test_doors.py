"""What one client can do to the others, and who may ask: keys, hosts, bodies, connections, and the end of a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerFast
from uvicorn.server import ServerState

from ballonet.allocator.errors import ConfigError, ManageError
from ballonet.hooks.server.anteroom import Anteroom
from ballonet.hooks.server.application import Address, Application
from ballonet.hooks.server.connections import BoundedConnection, ClientLimits, Connections, FewLines
from ballonet.hooks.server.doors import Doors, read_key
from ballonet.hooks.server.ending import Listening
from ballonet.hooks.server.engine import Denial
from ballonet.hooks.server.render_pool import RenderPool
from ballonet.hooks.server.render_worker import LENGTH
from ballonet.hooks.server.rendering import Source
from ballonet.hooks.server.served import Models, ServedModel, pooled, prepared_by
from ballonet.hooks.watch.endpoint import listen

from .. import programs
from ..tuned import Clock
from .scripted import END, LONGEST, NAME, Scripted, saved_tokenizer

KEY = "a key"
ADDRESSES = ("127.0.0.1", "192.0.2.7", "[::1]")
FILES = 20_000  # that a server may open
FOREVER = 1e6  # seconds that no test waits


async def answer_health(request: Request) -> JSONResponse:
    return JSONResponse({})


class Scene:
    """A server of a small application, on a thread of its own."""

    def __init__(self, doors: Doors, tuning: ClientLimits, most: int = 1000, longest: int = 0) -> None:
        self.bodies: list[int] = []  # bytes that reached the application
        self.cancelled = threading.Event()  # is set once a stream was
        self.stuck = threading.Semaphore(0)  # is released by each request that waits for ever, or that holds the loop
        self.goes_on = threading.Event()  # of such a loop
        routes = [
            Route("/health", answer_health),
            Route("/bytes", self._count, methods=["POST"]),
            Route("/stream", self._stream),
            Route("/stuck", self._wait),
            Route("/hold", self._hold),
        ]
        doors.guard(routes, longest, tuning)
        app = Starlette(routes=routes, middleware=doors.middleware(), exception_handlers={Denial: denied})
        self.connections = Connections(FILES, replace(tuning, connections=most))
        self._sockets = listen("127.0.0.1", 0)
        self.port = self._sockets[0].getsockname()[1]
        self._listening = Listening(app, self.connections)
        self._thread = threading.Thread(target=self._listening.run, args=[self._sockets])
        self._thread.start()

    def close(self) -> None:
        self._listening.should_exit = True
        self._thread.join()

    async def _count(self, request: Request) -> JSONResponse:
        self.bodies.append(0)
        async for part in request.stream():
            self.bodies[-1] += len(part)
        return JSONResponse(self.bodies[-1])

    async def _stream(self, request: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(2**16)
                    await asyncio.sleep(0)  # as tokens come one by one
            finally:
                self.cancelled.set()

        return StreamingResponse(parts())

    async def _wait(self, request: Request) -> JSONResponse:
        self.stuck.release()
        await asyncio.sleep(FOREVER)
        return JSONResponse({})

    async def _hold(self, request: Request) -> JSONResponse:
        self.stuck.release()
        self.goes_on.wait()
        return JSONResponse({})


async def denied(_: Request, denial: Exception) -> JSONResponse:
    assert isinstance(denial, Denial)
    return JSONResponse(denial.code, denial.status)


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    """Makes servers. `limits`: of the tuning of clients."""
    made: list[Scene] = []

    def make(doors: Doors | None = None, most: int = 1000, longest: int = 0, **limits: Any) -> Scene:
        tuning = ClientLimits(sweep=0.01, told=0.1, **limits)
        made.append(Scene(doors or Doors(), tuning, most, longest))
        return made[-1]

    yield make
    for server in made:
        server.close()


def connect(port: int, said: bytes = b"", room: int | None = None) -> socket.socket:
    """A client that has said something. `room`: bytes that its kernel keeps of an answer."""
    client = socket.socket()
    if room is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    client.connect(("127.0.0.1", port))
    client.sendall(said)
    return client


def head(path: str, *headers: str, method: str = "GET", host: str = "127.0.0.1") -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode("latin-1")


def read_end(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = []
    with client, contextlib.suppress(ConnectionResetError):
        while part := client.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def ask(port: int, *request: Any, body: bytes = b"", **named: Any) -> int:
    """The status of an answer."""
    answer = read_end(connect(port, head(*request, "Connection: close", **named) + body))
    return int(answer.split(b" ", 2)[1])


class Real:
    """A server of one model whose engine answers by a script, with processes that render, and all limits."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        tuning = ClientLimits(sweep=0.01, told=0.1, **limits)
        source = Source(saved_tokenizer(folder), family="qwen3", own_templates=True)
        self._pool = RenderPool(prepared_by([source]), tuning)
        self.engine = Scripted(PreTrainedTokenizerFast.from_pretrained(source.name))
        served = ServedModel(NAME, self.engine, source, pooled(self._pool), LONGEST, vocabulary=258, ends=(END,))
        self.app = Application(Models([served]), Address(doors=Doors(KEY, max_body=2**26)), lambda line: None).app
        sockets = listen("127.0.0.1", 0)
        self.port = sockets[0].getsockname()[1]
        self._pool.wait()
        self._listening = Listening(self.app, Connections(FILES, tuning))
        self._thread = threading.Thread(target=self._listening.run, args=[sockets])
        self._thread.start()

    def close(self) -> None:
        self._listening.should_exit = True
        self._thread.join()
        self._pool.close()

    def post(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A client that has asked."""
        content = json.dumps({"model": NAME, **body}).encode()
        key = f"Authorization: Bearer {KEY}"
        length = f"Content-Length: {len(content)}"
        return connect(self.port, head(path, key, length, "Connection: close", method="POST") + content)

    def refusal(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """The status of an answer, and the message of its error."""
        answer = read_end(self.post(path, body))
        begin, _, content = answer.partition(b"\r\n\r\n")
        return int(begin.split(b" ", 2)[1]), json.loads(content)["error"]["message"]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("real"), render=FOREVER)
    yield server
    server.close()


# -- who may ask


def test_every_route_of_the_application_but_health_needs_the_key(real: Real) -> None:
    answers = {
        (method, route.path): ask(real.port, route.path.replace("{model:path}", NAME), method=method)
        for route in real.app.routes
        for method in route.methods
    }
    assert len(answers) > 8
    assert {place: status for place, status in answers.items() if status != 401} == {
        ("GET", "/health"): 200,
        ("HEAD", "/health"): 200,
    }


def test_every_route_but_health_needs_the_key(scene: Callable[..., Scene]) -> None:
    port = scene(Doors(KEY)).port
    for path in ("/bytes", "/stream", "/stuck"):
        method = "POST" if path == "/bytes" else "GET"
        for sent in ("", "Authorization: Bearer", f"Authorization: {KEY}", f"Authorization: Bearer {KEY}\xff"):
            assert ask(port, path, *filter(None, [sent]), method=method) == 401
    assert ask(port, "/health") == 200
    assert ask(port, "/bytes", f"Authorization: bearer {KEY}", "Content-Length: 0", method="POST") == 200


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "health", "/health"])
def test_a_host_opens_no_door(scene: Callable[..., Scene], host: str) -> None:
    """Older versions of Starlette make a request's URL of it."""
    assert ask(scene(Doors(KEY)).port, "/stream", host=host) == 401


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *((f"{name}{port}", True) for name in (*ADDRESSES, "localhost", "LOCALHOST.") for port in ("", ":80")),
        *((f"{name}{port}", True) for name in ("a.example", "A.Example") for port in ("", ":80")),
        *((name, False) for name in ("b.example", "a.example.evil", "127.0.0.1.evil", "a.example/health")),
        *((name, False) for name in ("", "[::1", "::1", "a.example:80:80")),
    ],
)
def test_without_a_key_a_host_must_be_known(host: str, is_known: bool) -> None:
    """Or the name of a web page would lead a browser here (DNS rebinding)."""
    headers = Headers({"host": host})
    with contextlib.nullcontext() if is_known else pytest.raises(Denial, match="--allow-host"):
        Doors(hosts=frozenset({"a.example"})).check(headers, keyed=False)
    Doors(KEY).check(headers, keyed=False)


def test_without_a_host_no_browser_asks() -> None:
    Doors().check(Headers(), keyed=False)  # a probe by HTTP/1.0


def test_pages_may_ask_only_where_their_origin_is_allowed(scene: Callable[..., Scene]) -> None:
    page, other = "Origin: https://a.example", "Origin: https://b.example"
    closed, opened = scene().port, scene(Doors(origins=frozenset({"https://a.example"}))).port
    assert [ask(closed, "/health", origin) for origin in (page, other)] == [403, 403]
    assert [ask(opened, "/health", origin) for origin in (page, other)] == [200, 403]
    preflight = (page, "Access-Control-Request-Method: POST")
    assert [ask(port, "/bytes", *preflight, method="OPTIONS") for port in (closed, opened)] == [405, 200]


def test_a_key_comes_from_a_flag_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("of the file\n")
    assert read_key(None, None) is None
    monkeypatch.setenv("BALLONET_API_KEY", "of the environment")
    keys = [read_key(None, None), read_key("given", None), read_key(None, file), read_key("given", file)]
    assert keys == ["of the environment", "given", "of the file", "of the file"]
    for written in (b"\n", "ключ".encode(), b"\xff", b"two\nlines"):
        file.write_bytes(written)
        with pytest.raises(ConfigError, match="key"):
            read_key(None, file)
    with pytest.raises(ConfigError, match="no key can be read"):
        read_key(None, tmp_path / "missing")


# -- bodies


@pytest.mark.parametrize("how", ["Content-Length: 2000000", "Transfer-Encoding: chunked"])
def test_a_body_that_is_too_large_is_refused_while_it_comes(scene: Callable[..., Scene], how: str) -> None:
    server = scene(longest=8, token=1000, rest=2000)
    client = connect(server.port, head("/bytes", how, method="POST"))
    chunk = b"%x\r\n" % 5000 + bytes(5000) + b"\r\n" if "chunked" in how else bytes(5000)
    with client:
        client.sendall(chunk * 3)
        assert b" 413 " in client.recv(100), "before it ends"
    assert [nbytes <= 10000 for nbytes in server.bodies] == [True] * len(server.bodies)
    assert ask(server.port, "/bytes", "Content-Length: 10000", method="POST", body=bytes(10000)) == 200


# what 7 million words, 500,000 messages and 500,000 biases take
@pytest.mark.parametrize("nbytes", [21_000_000, 17_500_000, 6_400_000])
def test_a_body_far_beyond_the_longest_sequence_is_refused(nbytes: int, scene: Callable[..., Scene]) -> None:
    """A client that sends all of it first still reads why."""
    server = scene(longest=8192)
    length = f"Content-Length: {nbytes}"
    assert ask(server.port, "/bytes", length, method="POST", body=bytes(nbytes)) == 413
    with connect(server.port, head("/bytes", length, method="POST") + bytes(nbytes)) as client:
        assert b" 413 " in client.recv(1000)
        client.sendall(head("/health"))
        assert b" 200 " in client.recv(1000), "the connection is whole"
    assert server.bodies == []


def test_max_body_is_the_largest(scene: Callable[..., Scene]) -> None:
    port = scene(Doors(max_body=7), longest=100).port
    sizes = [ask(port, "/bytes", f"Content-Length: {n}", method="POST", body=bytes(n)) for n in (7, 8)]
    assert sizes == [200, 413]


def test_many_large_bodies_at_once_are_refused(scene: Callable[..., Scene]) -> None:
    server = scene(Doors(max_body=1000), bodies=1500)
    with connect(server.port, head("/bytes", "Content-Length: 1000", method="POST") + bytes(900)):
        wait(lambda: server.bodies == [900])
        second = head("/bytes", "Content-Length: 1000", method="POST") + bytes(1000)
        assert b" 503 " in connect(server.port, second).recv(100)
    wait(lambda: not server.connections.open)
    assert ask(server.port, "/bytes", "Content-Length: 1000", method="POST", body=bytes(1000)) == 200


# -- connections


def wait(until: Callable[[], object]) -> None:
    while not until():
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        (b"", {"headers": 0.05}),
        (b"GET /health HT", {"headers": 0.05}),
        (head("/bytes", "Content-Length: 100", method="POST") + bytes(50), {"body": 0.05}),
        (head("/bytes", "Transfer-Encoding: chunked", method="POST") + b"5\r\n12345\r\n", {"body": 0.05}),
        (head("/bytes", "Content-Length: 100", method="POST") + bytes(50), {"body": 0.05, "piece": 10**9}),
        (head("/health"), {"idle": 0.05}),
        (head("/health") + b"\r\n", {"idle": 0.05}),
        (head("/health") + b"GET /health HT", {"headers": 0.05}),
        (head("/nowhere", "Content-Length: 100", method="POST") + bytes(50), {"body": 0.05}),
    ],
)
def test_a_client_that_never_goes_on_is_ended(
    scene: Callable[..., Scene], said: bytes, limits: dict[str, float]
) -> None:
    server = scene(**limits)
    read_end(connect(server.port, said))
    wait(lambda: not server.connections.open)
    assert not server.connections.idle


def test_a_drop_now_and_then_is_not_enough(scene: Callable[..., Scene]) -> None:
    client = connect(scene(headers=0.1).port, b"GET /health HTTP/1.1\r\n")
    with client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while True:
            client.sendall(b"a: b\r\n")
            time.sleep(0.01)


def test_a_stream_that_nobody_reads_is_cancelled(scene: Callable[..., Scene]) -> None:
    server = scene(reader=0.05)
    with connect(server.port, head("/stream"), room=4096):
        server.cancelled.wait()


def test_a_stream_that_is_read_slowly_goes_on() -> None:
    """Each time that the client reads, it has its seconds again."""
    clock = Clock()
    loop = asyncio.new_event_loop()
    connection = BoundedConnection(
        config=uvicorn.Config(answer_health),
        server_state=ServerState(),
        app_state={},
        _loop=loop,
        connections=Connections(FILES, ClientLimits(reader=10), clock),
    )
    connection.connection_made(MagicMock(asyncio.Transport, is_closing=lambda: False))
    loop.close()
    for _ in range(5):
        connection.pause_writing()
        assert not connection.is_late(clock.now)
        clock.now += 9
        assert not connection.is_late(clock.now)
        connection.resume_writing()
    connection.pause_writing()
    assert not connection.is_late(clock.now)
    assert connection.is_late(clock.now + 11)


def test_a_client_that_leaves_a_stream_cancels_it(scene: Callable[..., Scene]) -> None:
    server = scene()
    connect(server.port, head("/stream")).close()
    server.cancelled.wait()


def test_idle_connections_make_room_for_others(scene: Callable[..., Scene]) -> None:
    server = scene(most=4)
    idle = [connect(server.port, said) for said in (b"", b"GET /hea", head("/health"), b"")]
    wait(lambda: len(server.connections.idle) == 4)
    assert ask(server.port, "/health") == 200
    assert read_end(idle[0]) == b"", "the one that was idle for longest"
    busy = []
    for _ in range(4):
        busy.append(connect(server.port, head("/stuck")))
        server.stuck.acquire()
    assert b" 503 " in read_end(connect(server.port))
    for client in (*idle[1:], *busy):
        client.close()
    wait(lambda: not server.connections.open)
    assert ask(server.port, "/health") == 200


def test_clients_that_come_at_once_are_connected_while_the_loop_is_held(scene: Callable[..., Scene]) -> None:
    server = scene(burst=1)
    clients = [connect(server.port, head("/hold", "Connection: close"))]
    server.stuck.acquire()
    try:
        for _ in range(20):
            clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            clients[-1].sendall(head("/health", "Connection: close"))
    finally:
        server.goes_on.set()
    assert [read_end(client).split(b" ", 2)[1] for client in clients] == [b"200"] * 21


def test_connections_leave_files_for_models() -> None:
    tuning = ClientLimits(connections=4000, files=200, burst=60)
    made = [Connections(files, tuning) for files in (10**6, 1000, 100, 0)]
    assert [(connections.most, connections.burst) for connections in made] == [(4000, 60), (800, 50), (75, 6), (1, 1)]


def test_a_request_that_no_route_takes_starts_no_thread(real: Real) -> None:
    assert ask(real.port, "/nowhere", f"Authorization: Bearer {KEY}") == 404
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("AnyIO")]


def test_a_logger_writes_few_lines() -> None:
    clock = Clock()
    lines = FewLines(3, clock)
    records = [logging.LogRecord("a", logging.ERROR, "", 0, "%s", (number,), None) for number in range(9)]
    assert [lines.filter(record) for record in records[:5]] == [True] * 3 + [False] * 2
    clock.now += 1
    assert lines.filter(records[5])
    assert records[5].getMessage() == "5 (2 lines before it were left out)"
    clock.now += 1
    assert lines.filter(records[6])
    assert records[6].getMessage() == "6"


# -- the end

SERVER = """
import asyncio, resource, sys, threading, time
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from ballonet.hooks.server.connections import ClientLimits, Connections, raise_files
from ballonet.hooks.server.ending import Listening, Watchdog
from ballonet.hooks.watch.endpoint import listen

grace, hung, files = map(float, sys.argv[1:])
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files) // 2, int(files)))

async def answer(request):
    return JSONResponse({})

async def wait(request):
    print("waits", flush=True)
    await asyncio.sleep(1e6)

async def hang(request):
    print("waits", flush=True)
    threading.Semaphore(0).acquire()

async def stream(request):
    async def parts():
        print("waits", flush=True)
        while True:
            yield bytes(100)
            await asyncio.sleep(0.01)
    return StreamingResponse(parts())

routes = [Route(f"/{call.__name__}", call) for call in (answer, wait, hang, stream)]
tuning = ClientLimits(told=0.05, headers=1e6, lines=5)
connections = Connections(raise_files(), tuning)
sockets = listen("127.0.0.1", 0)
print(sockets[0].getsockname()[1], flush=True)
with Watchdog(grace + hung):
    Listening(Starlette(routes=routes), connections, grace, lambda: print("tells", flush=True)).run(sockets)
print("ended", flush=True)
"""


class Server:
    """SERVER in a process of its own."""

    def __init__(self, folder: Path, grace: float, hung: float = FOREVER, files: int = 0) -> None:
        command = ["-c", SERVER, str(grace), str(hung), str(files)]
        self._program = programs.Program(command, folder, programs.ROOT, None)
        wait(lambda: self.said)
        self.port = int(self.said[0])

    @property
    def said(self) -> list[str]:
        return self._program.out.splitlines()

    @property
    def errors(self) -> str:
        return self._program.err

    def ask(self, path: str) -> socket.socket:
        """A client whose request runs."""
        client = connect(self.port, head(path))
        wait(lambda: self.said[-1] == "waits")
        return client

    def send(self, number: int) -> None:
        os.kill(self._program.process.pid, number)

    def ended(self) -> int:
        return self._program.ended().returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_without_requests_ends_at_once(tmp_path: Path, number: int) -> None:
    """Whoever is connected, and with a client that has left a stream: none of them has the grace time."""
    server = Server(tmp_path, FOREVER)
    idle = [connect(server.port, said) for said in (b"", b"GET /ans", head("/answer"))]
    server.ask("/stream").close()
    assert idle[2].recv(100)
    server.send(number)
    assert server.ended() == 0
    assert server.said[-1] == "ended"
    for client in idle:
        client.close()


def test_a_request_that_never_ends_is_told_and_closed(tmp_path: Path) -> None:
    server = Server(tmp_path, 0.05)
    with server.ask("/wait"):
        server.send(signal.SIGTERM)
        assert server.ended() == 0
    assert server.said[-2:] == ["tells", "ended"]


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    server = Server(tmp_path, FOREVER)
    with server.ask("/hang"):
        while "a second signal came" not in server.errors:  # signals of which the first is not known yet are one
            server.send(signal.SIGTERM)
            time.sleep(0.01)
        assert server.ended() == 1


def test_a_server_that_hangs_is_ended_after_the_grace_time(tmp_path: Path) -> None:
    server = Server(tmp_path, 0.05, 0.05)
    with server.ask("/hang"):
        server.send(signal.SIGTERM)
        assert server.ended() == 1
    assert "something hung" in server.errors


def test_idle_clients_lock_nobody_out_of_a_server_with_few_files(tmp_path: Path) -> None:
    server = Server(tmp_path, 0.05, files=128)
    idle = [connect(server.port) for _ in range(200)]
    assert ask(server.port, "/answer") == 200
    server.send(signal.SIGTERM)
    assert server.ended() == 0
    assert len(server.errors.splitlines()) < 20, server.errors
    for client in idle:
        client.close()


# -- while models load


def test_while_models_load_the_progress_is_told() -> None:
    said: list[str] = []
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    anteroom = Anteroom(sockets, said.append)
    anteroom.say("loading a model")
    answer = read_end(connect(port, head("/health", "Connection: close")))
    assert b" 503 " in answer
    assert b"retry-after: 5" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].endswith("not ready yet: loading a model")
    assert said == ["loading a model"]
    assert anteroom.leave() == sockets
    with connect(port, head("/health")) as client:  # waits for the next who listens
        listening = Listening(Starlette(routes=[Route("/health", answer_health)]), Connections(FILES))
        thread = threading.Thread(target=listening.run, args=[sockets])
        thread.start()
        assert b" 200 " in client.recv(100)
    listening.should_exit = True
    thread.join()


# -- hostile requests

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
RENDERERS = ("conversation", "tokenize", "return_dict", "tools", "tokenizer_kwargs", "truncation", "chat_template")


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    *((CHATS, {"messages": [USER], "chat_template_kwargs": {name: 1}}, name) for name in RENDERERS),
    (CHATS, {"messages": [USER], "chat_template_kwargs": {"chat_template": LOOP}}, "chat_template"),
    (CHATS, {"messages": [USER] * 500_000}, "messages"),
    (CHATS, {"messages": [USER], "logit_bias": {str(n): 1 for n in range(500_000)}}, "logit_bias"),
    (CHATS, {"messages": [{**USER, "content": "word " * 100_000}]}, "longest"),
    (CHATS, {"messages": [USER], "chat_template": "{{ 'a' * 2**34 }}"}, ""),
    ("/v1/completions", {"prompt": "word " * 100_000}, "longest"),
    ("/v1/responses", {"input": []}, "input"),
]


@pytest.mark.parametrize(("path", "body", "says"), HOSTILE)
def test_a_hostile_request_is_refused_by_name(path: str, body: dict[str, Any], says: str, real: Real) -> None:
    status, message = real.refusal(path, body)
    assert status == 400
    assert says in message


def test_health_is_answered_while_a_client_s_template_loops(real: Real) -> None:
    """Once its client leaves the process that renders is ended."""
    with real.post(CHATS, {"messages": [USER], "chat_template": LOOP}) as hostile:
        for _ in range(20):
            assert ask(real.port, "/health") == 200
        hostile.setblocking(False)
        with pytest.raises(BlockingIOError):
            hostile.recv(1)
    assert real.refusal("/v1/completions", {"prompt": "a" * (LONGEST + 1)})[0] == 400


def test_a_client_s_template_that_loops_is_ended(tmp_path: Path) -> None:
    server = Real(tmp_path, render=0.2)
    try:
        answers = [server.refusal(CHATS, {"messages": [USER], "chat_template": LOOP}) for _ in range(2)]
        assert answers == [(400, "the request takes longer than 0.2 s to be prepared")] * 2
    finally:
        server.close()


# -- rendering


def rendering(act: Callable[[RenderPool], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Runs a coroutine with a pool of processes."""

    async def run() -> None:
        pool = RenderPool(tuning=ClientLimits(**{"render": FOREVER, **limits}))
        try:
            pool.wait()
            await act(pool)
        finally:
            pool.close()

    asyncio.run(run())


def test_a_pool_that_cannot_prepare_its_jobs_says_so() -> None:
    pool = RenderPool((("operator:truediv", (1, 0)),))
    with pytest.raises(ManageError, match="do not start"):
        pool.wait()
    pool.close()


async def denial(asked: Coroutine[Any, Any, object]) -> Denial:
    with pytest.raises(Denial) as refused:
        await asked
    return refused.value


async def process_of(pool: RenderPool) -> int:
    """A process that computes jobs. Again, where one was lost, or a loaded machine took too long."""
    while True:
        with contextlib.suppress(Denial):
            return await pool.run("os:getpid", result=int)


def test_jobs_give_their_results_and_errors() -> None:
    async def act(pool: RenderPool) -> None:
        assert await asyncio.gather(*(pool.run("operator:add", "a", str(n), result=str) for n in range(9))) == [
            f"a{n}" for n in range(9)
        ]
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await pool.run("operator:truediv", 1, 0, result=float)

    rendering(act, renderers=2)


def test_a_job_beyond_its_time_ends_with_its_process() -> None:
    async def act(pool: RenderPool) -> None:
        before = await process_of(pool)
        refused = await denial(pool.run("time:sleep", FOREVER, result=object))
        assert (refused.status, "longer than 0.1 s" in refused.message) == (400, True)
        assert await process_of(pool) != before
        wait(lambda: not is_alive(before))

    rendering(act, render=0.1, renderers=1)


def test_a_job_whose_process_is_killed_is_refused() -> None:
    async def act(pool: RenderPool) -> None:
        refused = await denial(pool.run("signal:raise_signal", signal.SIGKILL, result=object))
        assert (refused.status, refused.retry_after) == (503, 1)
        worker = await pool.run("os:getpid", result=int)
        os.kill(worker, signal.SIGKILL)
        wait(lambda: not is_alive(worker))
        assert await process_of(pool) != worker

    rendering(act, renderers=1)


def test_a_job_whose_tokenizer_gives_up_is_too_large() -> None:
    async def act(pool: RenderPool) -> None:
        refused = await denial(pool.run("os:abort", result=object))
        assert (refused.status, "too large" in refused.message) == (400, True)
        assert await pool.run("operator:add", 1, 1, result=int) == 2

    rendering(act, renderers=1)


def test_a_process_whose_answer_nobody_reads_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    async def act(pool: RenderPool) -> None:
        job = pickle.dumps(("os:getpid", ()))
        mine, theirs = socket.socketpair()
        with mine, theirs:
            socket.send_fds(pool._forker, [LENGTH.pack(0)], [theirs.fileno()])
            (worker,) = LENGTH.unpack(mine.recv(LENGTH.size))
            mine.sendall(LENGTH.pack(len(job)) + job)
            select.select([mine], [], [])
        wait(lambda: not is_alive(worker))

    rendering(act)
    assert not capfd.readouterr().err


def test_a_pool_whose_first_process_is_killed_begins_again() -> None:
    async def act(pool: RenderPool) -> None:
        worker, forker = await pool.run("os:getpid", result=int), await pool.run("os:getppid", result=int)
        os.kill(forker, signal.SIGKILL)
        wait(lambda: not is_alive(worker))
        assert await pool.run("os:getppid", result=int) != forker

    rendering(act, renderers=1)


def test_a_job_beyond_its_memory_is_refused() -> None:
    async def act(pool: RenderPool) -> None:
        refused = await denial(pool.run("operator:mul", "a", 2**28, result=str))
        assert (refused.status, "too large" in refused.message) == (400, True)

    rendering(act, render_memory=2**27)


def test_a_process_that_keeps_much_memory_is_replaced() -> None:
    async def act(pool: RenderPool) -> None:
        worker = await pool.run("os:getpid", result=int)
        assert await pool.run("os:getpid", result=int) == worker
        await pool.run("operator:mul", "a", 2**25, result=str)
        assert await pool.run("os:getpid", result=int) != worker

    rendering(act, render_kept=2**24, renderers=1)


def test_jobs_beyond_the_queue_are_refused() -> None:
    async def act(pool: RenderPool) -> None:
        asked = [asyncio.create_task(pool.run("time:sleep", FOREVER, result=object)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await denial(pool.run("os:getpid", result=int))).status == 429
        for task in asked:  # whose clients leave
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert await pool.run("operator:add", 1, 1, result=int) == 2

    rendering(act, renderers=1, jobs=2)


def test_a_process_that_hangs_ends_with_the_server(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import asyncio
        from ballonet.hooks.server.render_pool import RenderPool

        async def run():
            pool = RenderPool()
            print(await pool.run("os:getpid", result=int), flush=True)
            asyncio.create_task(pool.run("time:sleep", 1e6, result=object))
            await asyncio.sleep(0.1)
            print("hangs", flush=True)
            await asyncio.sleep(1e6)

        asyncio.run(run())
    """)
    program = programs.Program(["-c", code], tmp_path, programs.ROOT, None)
    wait(lambda: "hangs" in program.out)
    program.process.kill()
    worker = int(program.out.split()[0])
    wait(lambda: not is_alive(worker))


def is_alive(process: int) -> bool:
    """Does it run? Not, where its parent has only to look."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_event_loop_turns_while_a_job_hangs() -> None:
    async def act(pool: RenderPool) -> None:
        asked = asyncio.create_task(pool.run("time:sleep", FOREVER, result=object))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not asked.done()
        asked.cancel()

    rendering(act, renderers=1)
