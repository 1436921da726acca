"""What a link between two replicas takes: the states of a microbatch, and bulk, between two processes.

host: both ends on the CPU, over gloo. one GPU: both on the same, over gloo from pinned memory of the host. two GPUs:
over NCCL. Of the last two there is what the machine has. A state waits for its answer, so half of that is counted.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import MIB, Figure, Options, Row, options, report

from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.errors import LinkClosed
from ballonet.hooks.replicas.link import Link, LinkState
from ballonet.hooks.replicas.pair import NcclConnect, Store, gpu_name, stream_of

SECONDS = 60.0  # that anything may take
STATE, BULK = 256 * 4096 * 2, 64 * MIB  # bytes: a microbatch of 256 tokens of an 8B model; layers
PEERS = {"host": ("cpu", "cpu"), "one GPU": ("cuda:0", "cuda:0"), "two GPUs": ("cuda:0", "cuda:1")}


def main() -> None:
    chosen = options("links", __doc__)
    rows = [measured(name, devices, chosen) for name, devices in PEERS.items() if there(devices)]
    report(chosen, "links", "links between two replicas", rows)


def there(devices: tuple[str, str]) -> bool:
    """Has the machine these devices?"""
    return all(each == "cpu" or int(each[-1]) < torch.cuda.device_count() for each in devices)


def measured(name: str, devices: tuple[str, str], chosen: Options) -> Row:
    """A row of the table."""
    store = Store.host(timeout=SECONDS)
    with other(devices[1], store.port), link(store, 1, 2, devices[0]) as end:
        size = 65536 if chosen.tiny else BULK
        states = [asked(end, STATE if not chosen.tiny else 8192) for _ in range(20)]
        bulk = [asked(end, size) for _ in range(1 + chosen.repetitions)][1:]
        over = "NCCL" if end.direct else "gloo"
        end.send(torch.zeros(0, dtype=torch.uint8), "data", urgent=True)
        with suppress(LinkClosed):  # by the other end, which has heard it
            end.recv("data", SECONDS)
    rates = [2 * size / seconds / 1e9 for seconds in bulk]
    return {
        "ends": name,
        "over": over,
        "a state, ms": Figure.of([each / 2 * 1e3 for each in states[5:]]),
        "bulk, GB/s": Figure.of(rates),
    }


def asked(end: Link, nbytes: int) -> float:
    """Seconds until so many bytes have come back."""
    data = torch.zeros(nbytes, dtype=torch.uint8, device=end.device)
    synchronize(end.device)
    began = time.perf_counter()
    end.send(data, "data", urgent=True)
    end.recv("data", SECONDS)
    synchronize(end.device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def link(store: Store, me: int, peer: int, name: str) -> Iterator[Link]:
    """One end, once it is formed."""
    device, wakeup = torch.device(name), Wakeup()
    gpu = gpu_name(device)
    made: dict[str, Any] = {"gpu": gpu, "device": device, "bulk": SECONDS}
    made["stream"] = stream_of(device) if gpu else nothing
    found = Link(NcclConnect(store, 1, me, peer, SECONDS, **made), 1, peer, wakeup, device=device)
    try:
        if wakeup.wait(lambda: found.state is LinkState.OPEN or None, SECONDS) is None:
            raise RuntimeError(f"the link was not formed: {found.error}")
        yield found
    finally:
        found.close()


def nothing() -> Any:
    raise AssertionError("there is no stream without a GPU")


@contextmanager
def other(device: str, port: int) -> Iterator[None]:
    """The other end, in a process of its own."""
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe()
    process = spawned.Process(target=answer, args=(device, port, there), daemon=True)
    process.start()
    try:
        yield
        process.join(SECONDS)
    finally:
        here.close()
        process.kill()


def answer(device: str, port: int, alive: Connection) -> None:
    """Sends back what comes."""
    store = Store.connect("127.0.0.1", port, timeout=SECONDS)
    with link(store, 2, 1, device) as end:
        while True:
            found = end.recv("data", SECONDS)
            if not found.numel():
                return
            end.send(found, "data", urgent=True)


if __name__ == "__main__":
    main()
