"""A program that has imported torch and makes a replica of itself for each connection: `nursery.py SOCKET`.

Over its connection a replica gets commands, one JSON object a line, and answers each with one. Its main loop beats, and
waits for commands, mail and links on one bell. It ends with its connection, and when the supervisor is lost; the
program ends with its standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any, NoReturn

import torch

from ballonet.hooks.replicas.bell import Bell
from ballonet.hooks.replicas.epoch import Epoch, Fence
from ballonet.hooks.replicas.epoch_links import Links
from ballonet.hooks.replicas.errors import ReplicaError, SupervisorLost
from ballonet.hooks.replicas.fingerprint import Fingerprint
from ballonet.hooks.replicas.link import Link
from ballonet.hooks.replicas.liveness import Heart, begin_beats
from ballonet.hooks.replicas.mailbox import SUPERVISOR, Mailbox
from ballonet.hooks.replicas.membership import join
from ballonet.hooks.replicas.pair import GlooConnect
from ballonet.hooks.replicas.placement import placement
from ballonet.hooks.replicas.rendezvous import open_store
from ballonet.hooks.replicas.sending import Heard
from ballonet.hooks.replicas.store import Store
from ballonet.hooks.replicas.suspicion import tell

LONG = 120.0  # s
FOUND_NO_SUPERVISOR = 3  # exit status


class Replica:
    """What a command is a method of, without `do_`. What it returns, or the class and text of its error, is the
    answer."""

    def __init__(self, connection: socket.socket) -> None:
        self.lines = connection.makefile("rw")
        self.bell = Bell()
        self.commands: deque[dict[str, Any] | None] = deque()
        self.fence = Fence()
        self.epochs: dict[int, Epoch] = {}
        self.store: Store
        self.mailbox: Mailbox
        self.heart: Heart
        self.links: Links
        self.joined = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.lines:
            self.commands.append(json.loads(line))
            self.bell.ring()
        self.commands.append(None)
        self.bell.ring()

    def _command(self) -> bool | None:
        return True if self.commands or (self.joined and self.mailbox._listener.error) else None

    def run(self) -> None:
        while True:
            if self.joined:
                self.heart.beat()
            if not self.bell.wait(self._command, 0.05):
                continue
            if self.joined and self.mailbox._listener.error:
                raise self.mailbox._listener.error
            command = self.commands.popleft()
            if command is None:
                return
            try:
                answer = getattr(self, f"do_{command.pop('do')}")(**command)
            except (ReplicaError, OSError) as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            self.lines.write(json.dumps(answer) + "\n")
            self.lines.flush()

    def do_host(self) -> Any:
        """Is a supervisor's store from now on, and nothing else."""
        self.store = Store.host(timeout=LONG)
        for member in range(4):
            begin_beats(self.store, member)
        return self.store.port

    def do_join(self, port: int, secret: str | None, fingerprint: str, member: int | None = None) -> Any:
        """`member`: is one without asking."""
        self.store = open_store(placement({}, f"127.0.0.1:{port}"), LONG)
        if member is None:
            member = join(self.store, secret, Fingerprint.decode(fingerprint), LONG)
        self.mailbox = Mailbox(self.store, member, secret or "", self.bell, self.fence)
        self.heart = Heart(self.store, member, time.perf_counter)
        me = member
        self.links = Links(
            me,
            lambda epoch, peer: GlooConnect(self.store, epoch, me, peer, LONG),
            self.bell,
            self.fence,
            heard=Heard(fault=self._lost),
        )
        self.joined = True
        return member

    def _lost(self, link: Link) -> None:
        tell(self.store, self.mailbox, self.epochs[link.epoch], link)

    def do_prepare(self, epoch: str) -> Any:
        found = Epoch.decode(epoch)
        self.epochs[found.number] = found
        self.links.prepare(found)
        return found.number

    def do_wait_formed(self) -> Any:
        assert self.links.prepared is not None
        self.links.prepared.wait(LONG)
        return True

    def do_commit(self, number: int) -> Any:
        self.links.commit(number)
        return self.fence.now

    def do_discard(self, number: int) -> Any:
        self.links.discard(number)
        return self.fence.now

    def do_send(self, peer: int, tag: str, value: float, count: int = 1, urgent: bool = False) -> Any:
        assert self.links.current is not None
        self.links.current.by_peer[peer].send(torch.full((count,), value), tag, urgent, check=not urgent)
        return True

    def do_recv(self, peer: int, tag: str) -> Any:
        """What comes first: a tensor, or mail."""
        assert self.links.current is not None
        begun = time.perf_counter()
        try:
            tensor = self.links.current.by_peer[peer].recv(tag, LONG, unless=self.mailbox.has)
            return {"value": tensor[0].item(), "count": tensor.numel()}
        except ReplicaError as error:
            mail = self.mailbox.take()
            found = {"error": type(error).__name__, "text": str(error), "after": time.perf_counter() - begun}
            return found if mail is None else {**found, "mail": mail.kind, **mail.body}

    def do_mail(self, timeout: float = LONG) -> Any:
        mail = self.mailbox.wait(timeout)
        return None if mail is None else {"mail": mail.kind, "epoch": mail.epoch, "sender": mail.sender, **mail.body}

    def do_post(self, kind: str, epoch: int, to: int = SUPERVISOR, times: int = 1) -> Any:
        for number in range(times):
            self.mailbox.post(to, kind, epoch, number=number)
        return True

    def do_hang(self) -> Any:
        """As a main loop whose kernel does not end."""
        time.sleep(10 * LONG)

    def do_left(self) -> Any:
        """Closes everything, and says what is left of threads and of open files."""
        self.links.close()
        self.mailbox.close()
        return {
            "threads": [each.name for each in threading.enumerate() if each.name.startswith("ballonet")],
            "files": len(os.listdir("/proc/self/fd")),
        }


def live(connection: socket.socket) -> NoReturn:
    replica = Replica(connection)
    status = 0
    try:
        replica.run()
    except SupervisorLost as error:
        status = FOUND_NO_SUPERVISOR
        replica.links.close()
        replica.mailbox.close()
        left = [each.name for each in threading.enumerate() if each.name.startswith("ballonet")]
        replica.lines.write(json.dumps({"error": "SupervisorLost", "text": str(error), "threads": left}) + "\n")
        replica.lines.flush()
    os._exit(status)


def main(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is gone at once
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(16)
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                connection.sendall(f"{os.getpid()}\n".encode())
                live(connection)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
