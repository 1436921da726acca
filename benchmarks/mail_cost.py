"""What the control plane of replicas carries, and what it costs the one process that all replicas talk to.

Bytes are those of a simulated run, whose messages are the live ones, each in a frame of its own. Tokens are told
over a real pipe by another process, as a replica tells them: those of one step at once.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection

from common import Figure, Options, interleaved

from ballonet.hooks.replicas.channel import MemberAdmission, Wakeup
from ballonet.hooks.replicas.child_processes import PipeToSupervisor, ReplicaPipes
from ballonet.hooks.replicas.messages import Fingerprint, Told, encoded
from ballonet.hooks.server.arrivals import RecordedArrival
from ballonet.hooks.whatif.replicas.fleet import VirtualFleet
from ballonet.hooks.whatif.replicas.run import run
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.decisions import Decision, Entry
from ballonet.offload.policy.replicas.events import Arrived, Finished, Left, Tick

ENVELOPE = 4  # bytes of the length of a frame
ANYONE = Fingerprint("", "", "", "", "")
OWN = (Arrived, Finished, Left, Tick)  # events that the supervisor itself tells its controller
PATIENCE = 600.0  # s
TOLD = 4096  # tokens
BATCHES = (1, 32)  # requests that decode on a replica


def carried(fleet: VirtualFleet, cost: ChunkCost, arrivals: Sequence[RecordedArrival]) -> float:
    """Bytes of control per replica and second, both ways, without prompts and tokens."""
    log: list[Entry] = []
    run(fleet, cost, arrivals, "drop", log=log.append)
    taken = [each for each in log if isinstance(each, Decision)]
    sent = [each.event for each in taken if not isinstance(each.event, OWN)]
    said = [*sent, *(action for each in taken for action in each.actions)]
    seconds = taken[-1].event.at - taken[0].event.at
    return sum(len(encoded(each)) + ENVELOPE for each in said) / seconds / fleet.replicas


def told(chosen: Options) -> Iterator[tuple[str, str, Figure]]:
    """(what, peer, microseconds of the supervisor's CPU for a token that it is told), by how many are told at once."""
    tokens = BATCHES[-1] if chosen.tiny else TOLD
    wakeup = Wakeup()
    replicas, context = ReplicaPipes(MemberAdmission("", 0), wakeup), multiprocessing.get_context("spawn")
    pipe, (asks, asked) = replicas.open(context), context.Pipe()
    replica = context.Process(target=_tell, args=(pipe, asked, tokens), daemon=True)
    replica.start()
    pipe.close()
    peers = {f"{batch} at once": partial(_taken, replicas, wakeup, asks, batch, tokens) for batch in BATCHES}
    for peer, found in interleaved(peers, 1 if chosen.tiny else 5).items():
        yield "the supervisor's CPU for a token that it is told, us", peer, found
    asks.send(0)
    replica.join()


def _taken(replicas: ReplicaPipes, wakeup: Wakeup, asks: Connection, batch: int, tokens: int) -> float:
    left = tokens
    asks.send(batch)
    assert wakeup.wait(lambda: replicas.has() or None, PATIENCE), "nobody tells"
    begin = time.process_time()
    while left:
        wakeup.wait(lambda: replicas.has() or None, PATIENCE)
        while replicas.take() is not None:
            left -= 1
    return (time.process_time() - begin) / tokens * 1e6


def _tell(pipe: Connection, asked: Connection, tokens: int) -> None:
    """What a replica does, for each number of requests that it is asked: in each step it has a token of each of them;
    0: it ends."""
    supervisor = PipeToSupervisor(pipe, Wakeup(), PATIENCE, print)
    supervisor.serving.set()
    supervisor.join(ANYONE)
    while batch := asked.recv():
        for first in range(0, tokens, batch):
            supervisor.post(*(Told(f"cmpl-{each}", 1, first, (1000 + each,)) for each in range(batch)))
