"""Replicas in processes of their own: joined, linked, killed, stopped; told of it; and formed anew."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ballonet.hooks.replicas.bell import Bell
from ballonet.hooks.replicas.epoch import Epoch, Fence, Phase, Preparation
from ballonet.hooks.replicas.fingerprint import Fingerprint
from ballonet.hooks.replicas.liveness import Watch, end_beats, read_beats
from ballonet.hooks.replicas.mailbox import STALE, SUPERVISOR, Mail, Mailbox
from ballonet.hooks.replicas.membership import Reception
from ballonet.hooks.replicas.secret import proof
from ballonet.hooks.replicas.store import Store
from ballonet.hooks.replicas.suspicion import SUSPECT, forget_epoch, is_suspect

LONG = 120.0  # s, until a test is given up; nothing is said of how fast this machine is
SERVED = Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0")
SECRET = "a secret"


class Child:
    """A replica's process, and what is said to it."""

    def __init__(self, path: Path) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(LONG)
        self.connection.connect(str(path))
        self.lines = self.connection.makefile("rw")
        self.pid = int(self.lines.readline())
        self.member = -2

    def begin(self, do: str, **arguments: Any) -> None:
        """Says what to do, and does not wait."""
        self.lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self.lines.flush()

    def answer(self) -> Any:
        line = self.lines.readline()
        assert line, f"process {self.pid} has ended"
        return json.loads(line)

    def __call__(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def close(self) -> None:
        """Ends the process, however it is."""
        if self.alive():
            self.signal(signal.SIGKILL)
        self.connection.close()
        eventually(lambda: not self.alive(), f"process {self.pid} ends")


def eventually(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"{what}: not within {LONG} s"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where processes come from that have imported torch."""
    path = tmp_path_factory.mktemp("nursery") / "socket"
    program = Path(__file__).with_name("nursery.py")
    with subprocess.Popen([sys.executable, str(program), str(path)], stdin=subprocess.PIPE) as process:
        eventually(lambda: path.exists() or process.poll() is not None, "the program listens")
        yield path
        process.communicate(b"\n", timeout=LONG)


class Supervisor:
    """The test itself."""

    def __init__(self, nursery: Path) -> None:
        self.nursery = nursery
        self.bell = Bell()
        self.fence = Fence()
        self.store = Store.host(timeout=LONG)
        self.mailbox = Mailbox(self.store, SUPERVISOR, SECRET, self.bell, self.fence)
        self.reception = Reception(self.store, SECRET, SERVED, self.bell, time.monotonic, LONG)
        self.children: list[Child] = []

    def replicas(self, count: int) -> list[Child]:
        """New ones, which have joined."""
        made = [Child(self.nursery) for _ in range(count)]
        self.children += made
        for child in made:
            child.member = child("join", port=self.store.port, secret=SECRET, fingerprint=SERVED.encode())
            admitted = self.bell.wait(self.reception.take, LONG)
            assert admitted is not None
            assert (admitted.member, admitted.fingerprint) == (child.member, SERVED)
        return made

    def form(self, number: int, children: Sequence[Child], commit: bool = True) -> Epoch:
        """One group of all of them."""
        layers = tuple((n, n + 1) for n in range(len(children)))
        epoch = Epoch(number, (tuple(child.member for child in children),), (layers,))
        preparation = Preparation(epoch, time.monotonic() + LONG)
        for child in children:
            assert child("prepare", epoch=epoch.encode()) == number
        for child in children:
            assert child("wait_formed") is True
            preparation.ready(child.member)
        assert preparation.decide(time.monotonic()) is Phase.COMMIT
        if commit:
            self.fence.advance(number)
            for child in children:
                assert child("commit", number=number) == number
        return epoch

    def dead(self, members: Sequence[int]) -> tuple[int, ...]:
        """Who stands still, once somebody does."""
        watch = Watch(time.monotonic)
        for member in members:
            watch.add(member)
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            if found := watch.look(read_beats(self.store, members)):
                return found
            time.sleep(0.05)
        return ()

    def mail(self, kind: str) -> Mail:
        """The next of a kind."""
        while True:
            mail = self.mailbox.wait(LONG)
            assert mail is not None, f"no mail {kind!r}"
            if mail.kind == kind:
                return mail

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.reception.close()
        self.mailbox.close()


@contextmanager
def supervising(nursery: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(nursery)
    try:
        yield supervisor
    finally:
        supervisor.close()


def test_a_killed_replica_is_heard_by_all_and_links_are_formed_anew(nursery: Path) -> None:
    """Three wait, the last one for who is not killed: that one hears of it by the control plane."""
    with supervising(nursery) as supervisor:
        first, killed, third = children = supervisor.replicas(3)
        epoch = supervisor.form(1, children)
        assert first("send", peer=killed.member, tag="state", value=7, count=3) is True
        assert killed("recv", peer=first.member, tag="state") == {"value": 7, "count": 3}
        first.begin("recv", peer=killed.member, tag="state")  # hears it by its link
        third.begin("recv", peer=first.member, tag="state")  # its link to `first` is good
        assert not is_suspect(supervisor.store, 1)
        killed.signal(signal.SIGKILL)
        heard = first.answer()
        assert heard["error"] in ("LinkError", "Interrupted")
        told = third.answer()
        assert (told["error"], told["mail"], told["peer"]) == ("Interrupted", SUSPECT, killed.member)
        mail = supervisor.mail(SUSPECT)
        assert (mail.epoch, mail.body["peer"]) == (1, killed.member)
        assert is_suspect(supervisor.store, 1)
        print(f"heard after {heard['after']:.3f} s by a neighbour's wait, {told['after']:.3f} s by a third party's")

        end_beats(supervisor.store, killed.member)
        (fresh,) = supervisor.replicas(1)
        assert fresh.member == 3  # nobody gets the number of the one that was killed
        supervisor.form(2, (first, third, fresh))
        for one, other in ((first, third), (third, fresh), (fresh, first)):
            assert one("send", peer=other.member, tag="again", value=one.member) is True
            # what was told of the epoch before calls nobody away any more
            assert other("recv", peer=one.member, tag="again") == {"value": one.member, "count": 1}
        forget_epoch(supervisor.store, epoch)
        assert not is_suspect(supervisor.store, 1)


def test_a_third_party_without_a_link_hears_only_by_mail(nursery: Path) -> None:
    """Which is heard by who has no link to the one that was killed at all."""
    with supervising(nursery) as supervisor:
        first, killed, third = children = supervisor.replicas(3)
        members = [child.member for child in children]
        epoch = Epoch(1, ((members[0], members[1]), (members[2],)), (((0, 1), (1, 2)), ((0, 2),)))
        for child in children:
            child("prepare", epoch=epoch.encode())
        for child in children:
            assert child("wait_formed") is True
            assert child("commit", number=1) == 1
        third.begin("mail")
        killed.signal(signal.SIGKILL)
        told = third.answer()
        assert (told["mail"], told["sender"], told["peer"]) == (SUSPECT, first.member, killed.member)


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_who_stands_still_is_dead_by_its_count_and_is_fenced_off(nursery: Path, how: str) -> None:
    with supervising(nursery) as supervisor:
        first, stopped, third = children = supervisor.replicas(3)
        members = [child.member for child in children]
        supervisor.form(1, children)
        begun = time.monotonic()
        if how == "stopped":
            stopped.signal(signal.SIGSTOP)
        else:
            stopped.begin("hang")
        assert supervisor.dead(members) == (stopped.member,)
        print(f"{how} replica dead after {time.monotonic() - begun:.3f} s")
        supervisor.form(2, (first, third))
        assert first("send", peer=third.member, tag="on", value=2) is True
        assert third("recv", peer=first.member, tag="on")["value"] == 2
        if how == "stopped":  # it wakes, knows nothing, and what it says is dropped
            stopped.signal(signal.SIGCONT)
            assert stopped("post", kind="done", epoch=1) is True
            eventually(lambda: supervisor.mailbox.wait(0.05) is None and stale_told(supervisor, stopped), "it is told")


def stale_told(supervisor: Supervisor, child: Child) -> bool:
    mail = child("mail", timeout=0.0)
    if mail is None or mail["mail"] != STALE:
        return False
    assert (mail["epoch"], mail["had"], mail["sender"]) == (2, 1, SUPERVISOR)
    return True


def test_mail_is_in_order_read_once_and_leaves_nothing(nursery: Path) -> None:
    with supervising(nursery) as supervisor:
        children = supervisor.replicas(2)
        before = supervisor.store.keys()
        for child in children:
            child.begin("post", kind="done", epoch=0, times=50)
        got: dict[int, list[int]] = {child.member: [] for child in children}
        for _ in range(100):
            mail = supervisor.mail("done")
            got[mail.sender].append(mail.body["number"])
        assert all(numbers == list(range(50)) for numbers in got.values())
        for child in children:
            assert child.answer() is True
        assert supervisor.mailbox.wait(0.0) is None
        assert supervisor.store.keys() == before
        spent = time.process_time()
        assert supervisor.mailbox.wait(1.0) is None
        print(f"a wait of 1 s took {time.process_time() - spent:.4f} s of the CPU")

        supervisor.store.push("mail/supervisor", "0" * 64 + json.dumps([0, 999, 0, "forged", {}]))
        supervisor.store.push("mail/supervisor", "nothing")
        replayed = json.dumps([children[0].member, 50, 0, "done", {}])  # as the last one that it sent
        supervisor.store.push("mail/supervisor", proof(SECRET, str(SUPERVISOR), replayed) + replayed)
        supervisor.store.keys()  # has an answer: what was pushed before, which has none, is there
        assert children[0]("post", kind="after", epoch=0) is True
        mail = supervisor.mailbox.wait(LONG)
        assert mail is not None
        assert (mail.kind, mail.sender) == ("after", children[0].member)
        assert supervisor.mailbox.refused == 3


def test_who_has_another_secret_or_model_is_refused(nursery: Path) -> None:
    with supervising(nursery) as supervisor:
        child = Child(supervisor.nursery)
        supervisor.children.append(child)
        port = supervisor.store.port
        for secret, fingerprint, error, text in (
            ("another", SERVED, "SecretRefused", "has another secret"),
            (None, SERVED, "SecretRefused", "none was given"),
            (SECRET, Fingerprint("0a1b", "float16 x 291", "0.1", "2.13.0", "5.23.0"), "OtherModel", "dtype is float16"),
        ):
            found = child("join", port=port, secret=secret, fingerprint=fingerprint.encode())
            assert (found["error"], text in found["text"]) == (error, True), found
        assert supervisor.reception.take() is None
        assert child("join", port=port, secret=SECRET, fingerprint=SERVED.encode()) == 0


def test_an_epoch_is_discarded_with_nothing_left_and_serving_goes_on(nursery: Path) -> None:
    """One of the members is killed before it prepares: what the others have formed, or wait for, is closed."""
    with supervising(nursery) as supervisor:
        first, second, killed = supervisor.replicas(3)
        supervisor.form(1, (first, second))
        epoch = Epoch(2, ((0, 1, 2),), (((0, 1), (1, 2), (2, 3)),))
        for child in (first, second):
            assert child("prepare", epoch=epoch.encode()) == 2
        killed.signal(signal.SIGKILL)
        for child in (first, second):
            assert child("discard", number=2) == 1
        assert first("send", peer=1, tag="on", value=5) is True
        assert second("recv", peer=0, tag="on")["value"] == 5
        stale = first("prepare", epoch=Epoch(1, ((0, 1),), (((0, 1), (1, 2)),)).encode())
        assert stale["error"] == "StaleEpoch"
        supervisor.form(3, (second, first))
        while any(child("left")["threads"] for child in (first, second)):  # gloo may hold one until it gives up
            pass


def test_epochs_leave_no_thread_file_or_key(nursery: Path) -> None:
    with supervising(nursery) as supervisor:
        children = supervisor.replicas(2)
        epoch = supervisor.form(1, children)
        keys, files = None, {}
        for number in range(2, 6):
            before, epoch = epoch, supervisor.form(number, children)
            assert children[0]("send", peer=children[1].member, tag="kv", value=number, count=1000) is True
            assert children[1]("recv", peer=children[0].member, tag="kv")["value"] == number
            forget_epoch(supervisor.store, before)
            keys = keys or supervisor.store.keys()
            for child in children:
                files.setdefault(child.pid, len(os.listdir(f"/proc/{child.pid}/fd")))
        assert supervisor.store.keys() == keys
        for child in children:
            eventually(
                lambda child=child: len(os.listdir(f"/proc/{child.pid}/fd")) <= files[child.pid],
                "links of epochs that are over are closed",
            )
            threads = child("left")["threads"]
            assert threads == []


def test_replicas_end_with_their_supervisor(nursery: Path) -> None:
    supervisor, *replicas = children = [Child(nursery) for _ in range(3)]
    try:
        port = supervisor("host")
        for member, child in enumerate(replicas):
            child.member = child("join", port=port, secret=SECRET, fingerprint=SERVED.encode(), member=member)
        epoch = Epoch(1, ((0, 1),), (((0, 1), (1, 2)),))
        for child in replicas:
            assert child("prepare", epoch=epoch.encode()) == 1
        for child in replicas:
            assert child("wait_formed") is True
            assert child("commit", number=1) == 1
        replicas[0].begin("recv", peer=1, tag="never")  # one waits for its link, the other for mail
        replicas[1].begin("mail")
        begun = time.monotonic()
        supervisor.signal(signal.SIGKILL)
        waited = replicas[0].answer()
        assert waited["error"] in ("SupervisorLost", "LinkClosed")  # the other may hear it first, and close
        assert replicas[1].answer()["error"] == "SupervisorLost"
        for child in replicas:
            last = child.answer()
            assert (last["error"], last["threads"]) == ("SupervisorLost", [])
            eventually(lambda child=child: not child.alive(), "it ends")
        print(f"replicas had ended {time.monotonic() - begun:.3f} s after their supervisor")
    finally:
        for child in children:
            child.close()
