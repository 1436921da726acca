"""Clients that connect, send half a request, cancel or go away: no page is left behind, and the server answers
afterwards. With BALLONET_SOAK, the form that takes longer, there are a thousand of them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from openai import OpenAI

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.options import ManageOptions
from ballonet.hooks.server.application import Address
from ballonet.hooks.server.server import Server

from ..pool import bytes_that_exist, take_out
from .test_server import KEY, ask, saved

CLIENTS = 1000 if "BALLONET_SOAK" in os.environ else 120
SEED = int(os.environ.get("BALLONET_SEED", "5"))
AT_ONCE = 60
PAGE = 8192
MOMENT = 0.005  # seconds between two looks, in which others run


class Here:
    """A server in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        self.model = saved(folder, 2)
        ballonet.install("24MiB", page_size=PAGE, host_budget="8MiB", device="cpu")
        address = Address(waiting=48)
        batching = {"page_size": 16, "max_batch_tokens": 64}
        self.server = Server([self.model], devices.require(), ManageOptions(), address, lambda line: None, **batching)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.server.app, log_level="critical"))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def idle(self) -> tuple[int, int]:
        """Waits until no request is left, and forgets the blocks that are kept for prompts; returns pages of KV, and
        those that the kernel has beyond what the core knows of."""
        loops = tuple(self.server.loops.values())
        while any(sum(loop.queued) for loop in loops):
            time.sleep(MOMENT)
        for loop in loops:
            cache = loop._manager.batch_processor.cache
            while cache.request_pages.requests():  # the step of those that were cancelled last may run
                time.sleep(MOMENT)
            with loop._manager.pause():
                cache.evict_kept(cache.pages.nbytes)
                cache.pool.try_to_free_sectors()
        device = devices.require()
        device.reap(wait=True)
        device.trim()
        device.check()
        now = device.snapshot()
        return now["pages"]["kv"], bytes_that_exist() - now["created"] * PAGE

    def end(self) -> None:
        self.client.close()
        self._uvicorn.should_exit = True
        self._thread.join(600)
        assert not self._thread.is_alive()
        self.server.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    server = Here(tmp_path)
    yield server
    server.end()
    del server
    gc.collect()
    take_out()


def test_clients_of_every_kind_leave_nothing(here: Here) -> None:
    alone = [ask(here.client, here.model, first) for first in (3, 20)]
    before = here.idle()
    assert before[1] == 0
    outcomes = come(here.port, here.model, CLIENTS, random.Random(SEED))
    print(outcomes)
    check(outcomes, CLIENTS)
    assert here.idle() == before
    assert [ask(here.client, here.model, first) for first in (3, 20)] == alone
    assert here.idle() == before


def come(port: int, model: str, count: int, draw: random.Random) -> Counter[str]:
    """Has so many clients come. Returns what became of those of each kind."""
    outcomes = Counter[str]()
    plans = [(name, draw.random()) for name in draw.choices(list(PLANS), k=count)]

    async def all_of_them() -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(name: str, chance: float) -> None:
            async with room:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                outcomes[f"{name}: {await PLANS[name](reader, writer, model, chance)}"] += 1
                writer.transport.abort() if chance < 0.5 else writer.close()  # a reset, or a good end

        await asyncio.wait_for(asyncio.gather(*(one(*plan) for plan in plans)), 3000)

    asyncio.run(all_of_them())
    return outcomes


def check(outcomes: Counter[str], count: int) -> None:
    """Is it what may become of so many?"""
    assert {outcome.split(": ")[1] for outcome in outcomes if outcome.startswith("answered")} <= {"200", "429"}
    assert min(outcomes["answered: 200"], outcomes["streamed: 200"]) > count / 50
    assert outcomes["gone in the middle: gone"] > count / 20


def request(model: str, tokens: int, *, stream: bool) -> bytes:
    body = json.dumps({"model": model, "prompt": "w3 w4 w5", "max_tokens": tokens, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, chance: float) -> str:
    """Connects, and sends nothing."""
    await asyncio.sleep(0.05 * chance)
    return "gone"


async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, chance: float) -> str:
    """Sends a part of a request: of its head, or of its body."""
    sent = request(model, 300, stream=chance < 0.3)
    writer.write(sent[: int(len(sent) * chance)])
    await writer.drain()
    return "gone"


async def at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, chance: float) -> str:
    """Sends a request, and waits for nothing or for a moment."""
    writer.write(request(model, 300, stream=chance < 0.3))
    await writer.drain()
    await asyncio.sleep(0.2 * chance)
    return "gone"


async def streamed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, chance: float) -> str:
    """Reads the beginning of an answer."""
    writer.write(request(model, 300, stream=True))
    await writer.drain()
    return (await reader.read(12)).decode()[9:]


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, chance: float) -> str:
    """Reads all of a short answer."""
    writer.write(request(model, 2, stream=False).replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"))
    await writer.drain()
    return (await reader.read()).decode()[9:12]


async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, chance: float) -> str:
    """Sends what is no HTTP."""
    writer.write(random.Random(chance).randbytes(200) + b"\r\n\r\n")
    await writer.drain()
    return (await reader.read(12)).decode()[9:] or "gone"


PLANS = {
    "silent": silent,
    "half": half,
    "gone in the middle": at_once,
    "streamed": streamed,
    "answered": answered,
    "nonsense": nonsense,
}
