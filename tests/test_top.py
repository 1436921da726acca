"""`ballonet top` as a user meets it: in a pseudo-terminal, on a pipe, for scripts, with wrong arguments."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import control, devices
from ballonet.hooks.watch.processes import WatchedProcesses

from .counting import each_call
from .models import build, prompts
from .pool import take_out
from .tuned import Clock, Tuned

PAGE = 65536
ME = os.getpid()
SECONDS = 120  # that a screen may take to come: only one that never comes takes them
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
WATCHED = """
import sys
from ballonet.allocator import control, devices
from ballonet.allocator.config import Config
devices.start(Config(device="cpu", page_size=65536, budget=2**23))
control.start(lambda nbytes, timeout, number: devices.of(number).device.set_budget(nbytes))
print("ready", flush=True)
sys.stdin.read()
"""
TOP = """
import pathlib, sys
from ballonet.allocator import control
from ballonet.__main__ import main
look, only, patience = control.look, sys.argv[1], float(sys.argv[2])
control.look = lambda pid, since, folders, _, device: look(
    pid, since, folders, 600.0 if since is None else patience, device
)
if only:
    control.control_dirs = lambda: (pathlib.Path(only),)
sys.exit(main(["top", *sys.argv[3:]]))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where processes of the tests listen. Its name is short: the path of a socket may have 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="b-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    monkeypatch.setitem(WatchedProcesses.__init__.__kwdefaults__, "patience", 600.0)
    yield made
    shutil.rmtree(made)


def top_of(*arguments: str, only: str = "", patience: float = 600.0) -> list[str]:
    """The command, which watches processes that may take long to answer. `only`: the folder of sockets, without those
    that every process looks at; `patience`: seconds that an answer may take after the first."""
    return [sys.executable, "-c", TOP, only, f"{patience}", *arguments]


@pytest.fixture
def installed() -> Iterator[None]:
    ballonet.install("8MiB", page_size=PAGE, device="cpu")
    yield
    take_out()


class Terminal:
    """`top` with a terminal of 50 lines and 140 columns."""

    def __init__(self, *arguments: str, kind: str = "xterm-256color", **options: Any) -> None:
        """`kind`: of terminal; `options`: of `top_of`."""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 50, 140, 0, 0))
        self.slave, self.before = slave, termios.tcgetattr(slave)
        self.output = ""
        environment = {**os.environ, "TERM": kind}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            environment.pop(name, None)
        command = top_of(*arguments, **options)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )

    @property
    def screen(self) -> str:
        """What is to be seen: all that was drawn since the cursor went home last."""
        return CONTROLS.sub("", self.output.rpartition("\x1b[H")[2])

    def wait(self, there: Callable[[str], object]) -> str:
        """The first screen of which that is true."""
        end = time.monotonic() + SECONDS
        while not there(self.screen):
            ready, _, _ = select.select([self.master], [], [], SECONDS)
            assert ready, f"nothing came: {self.screen}"
            assert time.monotonic() < end, f"it never came: {self.screen}"
            self.output += os.read(self.master, 65536).decode(errors="replace")
        return self.screen

    def shows(self, text: str) -> str:
        """Waits for the text."""
        return self.wait(lambda screen: text in screen)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """The exit code. The rest of the output is read meanwhile: a terminal that nobody reads is full. Threads that
        fail show there."""
        end, code = time.monotonic() + SECONDS, None
        while code is None:
            assert time.monotonic() < end, f"it does not end: {self.screen}"
            code = self.process.poll()
            while select.select([self.master], [], [], 0.01)[0]:
                self.output += os.read(self.master, 65536).decode(errors="replace")
        assert "Traceback" not in self.output
        return code

    def is_as_before(self) -> bool:
        """Has the terminal its modes back, its screen, and its cursor?"""
        left = self.output.rfind("\x1b[?1049l") > self.output.rfind("\x1b[?1049h")
        cursor = self.output.rfind("\x1b[?25h") > self.output.rfind("\x1b[?25l")
        return left and cursor and termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield start
    for shown in opened:
        shown.close()


@pytest.mark.usefixtures("installed")
def test_a_budget_is_changed_from_the_screen(terminal: Callable[..., Terminal]) -> None:
    top = terminal(f"{ME}", "--every", "200ms")
    screen = top.shows("disk")
    for text in ("[b] budget", f"process {ME}", "CPU (host stand-in)", "budget 8MiB", "weights", "not allocated", "░"):
        assert text in screen, text
    devices.of().events.decided("kv", "reclaim", 3, what="KV cache of llama")
    top.shows("kv, reclaim: 3 pages (192KiB) of KV cache of llama, for MainThread")

    top.press("b")
    top.shows(f"budget of process {ME}, now 8MiB: _")
    top.press("4MiB\r")
    top.shows(f"change the budget of process {ME} from 8MiB to 4MiB?")
    assert ballonet.stats().budget == 2**23, "not before it is confirmed"
    top.press("y")
    top.shows(f"the budget of process {ME} is 4MiB")
    assert ballonet.stats().budget == 2**22
    top.wait(lambda screen: "· budget 4MiB" in screen and "budget, set: 64 pages (4MiB)" in screen)

    top.press("b1KiB\ry")
    top.shows(f"process {ME} refused: the budget is 1KiB, which is less than")
    top.press("b2MiB\rn")
    top.shows("the budget is as it was")
    assert ballonet.stats().budget == 2**22
    top.press("q")
    assert top.end() == 0
    assert top.is_as_before()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(
    terminal: Callable[..., Terminal], number: signal.Signals, code: int
) -> None:
    top = terminal(f"{ME}")
    top.shows("[b] budget")
    assert termios.tcgetattr(top.slave) != top.before
    top.process.send_signal(number)
    assert top.end() == code
    assert top.is_as_before()


@contextmanager
def listening(program: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, which imports no torch and ends when its stdin does."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def watched() -> Iterator[subprocess.Popen[str]]:
    with listening(WATCHED) as process:
        yield process


@pytest.mark.usefixtures("installed")
def test_all_processes_are_listed_and_one_is_chosen(
    terminal: Callable[..., Terminal], watched: subprocess.Popen[str], folder: Path
) -> None:
    top = terminal("--every", "200ms", only=str(folder / "ballonet"))
    first, second = sorted([ME, watched.pid])
    listed = rf"> +{first} .*\n +{second} .*8MiB +░"
    screen = top.wait(lambda screen: re.search(listed, screen) and f"process {first} · " in screen)
    assert f"process {second} · " not in screen
    top.press("j")
    top.wait(lambda screen: re.search(rf"> +{second} ", screen) and f"process {second} · " in screen)
    top.press("b1MiB\ry")
    top.shows(f"the budget of process {second} is 1MiB")
    top.press("\x1b[B")
    top.wait(lambda screen: re.search(rf"> +{first} ", screen) and f"process {first} · " in screen)
    assert control.ask(first, None, 1)["budget"] == 2**23
    assert control.ask(second, None, 1)["budget"] == 2**20
    if first == ME:
        top.press("j")
    top.shows(f"process {watched.pid} · ")  # the one that ends is chosen
    watched.communicate()
    top.wait(lambda screen: f"process {ME} · " in screen and f"{watched.pid} " not in screen)
    top.press("q")
    assert top.end() == 0


def test_a_process_that_hangs_is_said_to_and_it_ends_with_the_process(
    terminal: Callable[..., Terminal], watched: subprocess.Popen[str]
) -> None:
    top = terminal(f"{watched.pid}", "--every", "100ms", patience=0.5)
    top.shows("[b] budget")
    watched.send_signal(signal.SIGSTOP)
    top.shows("did not answer")
    watched.send_signal(signal.SIGCONT)
    watched.communicate()
    assert top.end() == 0
    assert f"process {watched.pid} has ended" in top.output
    assert top.is_as_before()


# -- a process with several devices


@pytest.fixture
def two_devices() -> Iterator[subprocess.Popen[str]]:
    """As `watched`, with a second device of the stand-in."""
    also = 'devices.start(Config(device="cpu", page_size=65536, budget=2**24), number=1)\ncontrol.start'
    with listening(WATCHED.replace("control.start", also)) as process:
        yield process


def test_each_device_of_a_process_is_shown_and_has_its_budget(
    terminal: Callable[..., Terminal], two_devices: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pid = two_devices.pid
    top = terminal(f"{pid}", "--every", "200ms")
    first, second = rf"{pid} .*stand-in 0\) +8MiB ", rf"{pid} .*stand-in 1\) +16MiB "
    top.wait(lambda screen: re.search(rf"> +{first}.*\n +{second}", screen) and "· CPU (host stand-in 0) ·" in screen)
    top.press("j")
    top.wait(lambda screen: re.search(rf"> +{second}", screen) and "· CPU (host stand-in 1) ·" in screen)
    top.press("b4MiB\r")
    top.shows(f"change the budget of device 1 of process {pid} from 16MiB to 4MiB?")
    top.press("y")
    top.shows(f"the budget of device 1 of process {pid} is 4MiB")
    top.press("q")
    assert top.end() == 0

    assert main(["top", f"{pid}", "--once", "--json"]) == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    assert [(process["device"]["number"], process["budget"]) for process in processes] == [(0, 2**23), (1, 2**22)]
    assert [process["events"][-1:] != [] for process in processes] == [False, True], "each has its own decisions"


# -- no terminal, and scripts


@pytest.mark.usefixtures("installed")
def test_a_terminal_that_cannot_be_drawn_on_gets_lines(terminal: Callable[..., Terminal]) -> None:
    top = terminal(f"{ME}", "--every", "100ms", kind="dumb")
    top.wait(lambda screen: screen.count(f"process {ME} · ") >= 2)
    assert "no model is managed; 8MiB of 8MiB free" in top.output
    assert "\x1b" not in top.output
    top.process.send_signal(signal.SIGINT)
    assert top.end() == 0


@pytest.mark.usefixtures("installed")
def test_a_pipe_gets_lines_until_nobody_reads() -> None:
    command = top_of(f"{ME}", "--every", "50ms")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(2):
        line = process.stdout.readline()
        assert line.startswith(f"process {ME} · ")
        assert line.endswith("no model is managed; 8MiB of 8MiB free\n")
    process.stdout.close()
    assert (process.wait(SECONDS), process.stderr.read()) == (0, "")
    process.stderr.close()


@pytest.mark.usefixtures("installed")
def test_scripts_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"{ME}", "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (one,) = json.loads(line)["processes"]
    assert (one["pid"], one["budget"], one["rates"], one["trouble"]) == (ME, 2**23, {}, "")
    assert "cursor" not in one
    assert main(["top", f"{ME}", "--once", "--json", "--every", "10ms"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["processes"]
    assert set(one["rates"]) == set(one["copied"])
    assert main(["top", f"{ME}", "--once"]) == 0
    assert capsys.readouterr().out.startswith(f"process {ME} · ")


def test_where_nobody_is_there_it_says_so_and_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from ballonet.allocator import control; from ballonet.__main__ import main\n"
        "control.control_dirs = lambda: ()\n"
        "sys.exit(main(['top', '--once', '--json']) or main(['top', '--once']) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == '{"processes": []}'
    assert "no process of yours runs ballonet" in done.stdout


# -- what a look costs


class Looking:
    """A thread looks at this process, again and again, as `top` does, and has done so once. `looks`: how often."""

    def __init__(self) -> None:
        self.looks = 0
        self._first = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        cursor = None
        while not self._end.is_set():
            cursor = control.look(ME, cursor, patience=SECONDS)["cursor"]
            self.looks += 1
            self._first.set()

    def __enter__(self) -> Looking:
        self._thread.start()
        assert self._first.wait(SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def calls_of_steps(model: Any, enough: Callable[[], bool]) -> Counter[int]:
    """How many decode steps made how many of ballonet's calls on this thread, until it is enough."""
    calls = Counter[int]()
    with torch.no_grad():
        cache = model(prompts(batch=1, longest=9)["input_ids"], use_cache=True).past_key_values
        while not enough() or calls.total() < 16:
            names: list[str] = []
            with each_call(lambda frame, to=names: to.append(frame.f_globals.get("__name__", ""))):
                model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
            calls[sum(name.startswith("ballonet.") for name in names)] += 1
    return calls


def test_a_decode_makes_no_more_calls_while_it_is_watched(tuned: Tuned) -> None:
    tuned(clock=Clock(step=1e-4))
    ballonet.install("32MiB", page_size=PAGE, device="cpu")
    model = build("llama")
    with ballonet.manage(model):
        ((alone, _),) = calls_of_steps(model, lambda: True).most_common(1)
        with Looking() as looking:
            ((watched, _),) = calls_of_steps(model, lambda: looking.looks >= 8).most_common(1)
    assert watched == alone > 0
