"""A server whose disk is full, or that is killed while it writes: requests are answered, and what is found again is
what was stored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APIError

from ballonet.offload.residency import prefix_files

from .test_server import Serving, by_stock, complete

# `ballonet` with small blocks of prefixes. As long as there is a file `full` its disk is; where there is `half`, the
# next write stops in the middle, for good.
STORING = """
import errno, os, pathlib, sys, threading
from ballonet.__main__ import main
from ballonet.offload.timeline import file
from tests.tuned import tuning

flags, write, put = pathlib.Path(sys.argv[1]), os.pwrite, file.put

def check():
    if (flags / "full").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def pwrite(fd, piece, offset):
    check()
    if (flags / "half").exists():
        write(fd, piece[: len(piece) // 2], offset)
        (flags / "stopped").touch()
        threading.Semaphore(0).acquire()
    return write(fd, piece, offset)

def puts(*given):
    check()
    put(*given)

os.pwrite, file.put = pwrite, puts
file.written.__defaults__ = (10**6, 0.01)
with tuning(prefixes={"block": 16, "rest": 0.0, "again": 0}):
    sys.exit(main(sys.argv[2:]))
"""
TOKENS = 4
STORED = 64  # tokens of a prompt


class Disk:
    """A disk that becomes full. `folder`: is on it; `flags`: for STORING."""

    def __init__(self, folder: Path, flags: Path) -> None:
        self.folder = folder
        self.flags = flags

    def fill(self) -> None:
        """Leaves no room."""
        (self.flags / "full").touch()

    def make_room(self) -> None:
        """Undoes `fill`."""
        (self.flags / "full").unlink()


class MountedDisk(Disk):
    """A file system of its own."""

    def fill(self) -> None:
        status = os.statvfs(self.folder)
        (self.folder / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize))

    def make_room(self) -> None:
        (self.folder / "ballast").unlink()


@pytest.fixture(params=["a small disk", "a fault"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """An empty one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "a fault":
        yield Disk(folder, tmp_path)
        return
    options = "size=8m,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield MountedDisk(folder, tmp_path)
    subprocess.run(["umount", "--lazy", folder], check=True)


def prompt(number: int) -> str:
    """A prompt of some blocks, whose first is that of others, too."""
    return " ".join(f"w{3 + (n if n < 16 else n * (number + 2)) % 50}" for n in range(STORED))


def ask_for(server: Serving, text: str, tokens: int) -> str:
    """The completion of a text, from a client of its own."""
    with server.client() as client:
        return complete(client, server.models[0], text, tokens)


def wait(server: Serving, until: Callable[[], object]) -> None:
    """Waits for what the server does."""
    while not until():
        assert server.process.poll() is None, server.said()
        time.sleep(0.01)


def stored(folder: Path) -> dict[str, bytes]:
    """What there is of prefixes, by name."""
    return {path.name: path.read_bytes() for path in folder.glob("prefix-*")}


def start(folder: Path, disk: Disk) -> Serving:
    options = ("--prefix-dir", str(disk.folder / "prefixes"), "--timeline", str(disk.folder / "drawn.json"))
    return Serving(folder, *options, layers=(2,), begin=("-c", STORING, str(disk.flags)))


def test_a_server_whose_disk_is_full_answers_and_stores_again(disk: Disk, tmp_path: Path) -> None:
    server = start(tmp_path, disk)
    try:
        (disk.folder / "prefixes").mkdir(0o700, exist_ok=True)
        disk.fill()
        for number in range(3):
            assert ask_for(server, prompt(number), TOKENS) == by_stock(server.models[0], prompt(number), TOKENS)
        wait(server, lambda: "not stored in" in server.said())
        assert not stored(disk.folder / "prefixes")
        disk.make_room()
        texts = [ask_for(server, prompt(number), TOKENS) for number in range(3, 6)]
        wait(server, lambda: len(stored(disk.folder / "prefixes")) >= 3)
        disk.fill()
        server.process.send_signal(signal.SIGTERM)
        wait(server, lambda: "there is no room for" in server.said())
        disk.make_room()
        assert server.ended() == 0, server.said()
        assert "Traceback" not in server.said(), server.said()
        assert json.loads((disk.folder / "drawn.json").read_text())["traceEvents"]
    finally:
        server.process.kill()
    server = start(tmp_path, disk)
    try:
        assert [ask_for(server, prompt(number), TOKENS) for number in range(3, 6)] == texts
        assert server.figure('ballonet_prompt_tokens_total{found="disk"') > 0
    finally:
        server.process.kill()


def test_a_server_killed_while_it_writes_goes_on_with_what_is_whole(tmp_path: Path) -> None:
    """By SIGKILL, while other clients ask."""
    disk = Disk(tmp_path, tmp_path)
    prefixes, half = tmp_path / "prefixes", tmp_path / "half"
    before = dict[str, bytes]()
    expected = dict[int, str]()
    for first in (0, 8):
        server = start(tmp_path, disk)
        try:
            expected = expected or {n: by_stock(server.models[0], prompt(n), TOKENS) for n in range(16)}
            with ThreadPoolExecutor(8) as threads:
                asked = [threads.submit(ask_for, server, prompt(n), TOKENS) for n in range(first + 2)]
                assert [call.result() for call in asked] == [expected[n] for n in range(first + 2)]
                wait(server, lambda: len(stored(prefixes)) > len(before))  # noqa: B023
                half.touch()
                asked = [threads.submit(ask_for, server, prompt(n), TOKENS) for n in range(first + 2, first + 8)]
                wait(server, (tmp_path / "stopped").exists)
                server.process.kill()
        finally:
            server.process.kill()
        for path in (half, tmp_path / "stopped"):
            path.unlink()
        for number, call in enumerate(asked, first + 2):
            assert isinstance(call.exception(), APIError) or call.result() == expected[number]
        assert list(prefixes.glob(".prefix-*.part")), "it was killed in the middle"
        now = stored(prefixes)
        assert now | before == now
        assert len(now) > len(before)
        before = now
        for name in now:
            with (prefixes / name).open("rb") as file:
                prefix_files.read(name, file.fileno())  # raises for what is damaged
    server = start(tmp_path, disk)
    try:
        assert {n: ask_for(server, prompt(n), TOKENS) for n in range(16)} == expected
        assert server.figure('ballonet_prompt_tokens_total{found="disk"') > 0
        wait(server, lambda: not list(prefixes.glob(".prefix-*.part")))
        assert server.end() == 0, server.said()
        assert stored(prefixes) | before == stored(prefixes)
    finally:
        server.process.kill()
