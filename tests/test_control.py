"""A process that is asked for its budget from outside: who may, what it says, and what is left when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import control, devices
from ballonet.allocator.config import Config, control_dirs
from ballonet.allocator.control import Control, ask
from ballonet.allocator.errors import (
    BudgetError,
    ConfigError,
    ControlError,
    ControlRefused,
    NoSuchProcess,
    NotPermitted,
    NotReachable,
)

from .foreign import gives_away
from .programs import gone

PAGE = 65536
ME = os.getpid()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: the path of a socket may have 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="b-"))
    yield made / "s"
    shutil.rmtree(made)


@pytest.fixture
def installed() -> Iterator[None]:
    devices.start(Config(device="cpu", page_size=PAGE, budget=2**21))
    yield
    devices.stop()


Listening = Callable[..., Control]


@pytest.fixture
def listening(folder: Path) -> Iterator[Listening]:
    """Starts one that obeys by a function of the test."""
    opened: list[Control] = []

    def start(
        set_budget: Callable[[int, float, int | None], None] = lambda nbytes, timeout, number: None, **grace: float
    ) -> Control:
        opened.append(Control(set_budget, [folder], **grace))
        return opened[-1]

    yield start
    for listener in opened:
        listener.close()


def said(path: Path, *lines: bytes) -> bytes:
    """What it answers to raw bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        answer = b""
        with contextlib.suppress(ConnectionError):  # it was closed with something of ours unread
            for line in lines:
                connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                answer += part
    return answer


@pytest.mark.usefixtures("installed")
def test_asked_process_says_its_budget_and_who_owns_what(listening: Listening, folder: Path) -> None:
    listening()
    told = ask(ME, None, 1, [folder])
    assert told == {
        "pid": ME,
        "budget": 2**21,
        "page_size": PAGE,
        "pages": {"free": 0, "weights": 0, "activations": 0, "kv": 0, "pending_free": 0},
        "host_pages": 0,
        "peer": "",
        "peer_budget": 0,
        "peer_pages": 0,
        "spilled": 0,
    }


@pytest.mark.usefixtures("installed")
def test_asked_process_is_given_a_budget_and_the_time_for_that(listening: Listening, folder: Path) -> None:
    asked: list[tuple[int, float, str]] = []
    listening(lambda nbytes, timeout, number: asked.append((nbytes, timeout, threading.current_thread().name)))
    assert ask(ME, 2**20, 7.5, [folder])["budget"] == 2**21
    assert asked == [(2**20, 7.5, "ballonet-control")]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "error",
    [BudgetError(5 * 2**20, 2**20, 6 * 2**20), ConfigError("the budget is too small"), ValueError("ballonet: x")],
)
def test_error_of_the_process_is_a_refusal_with_the_number(
    listening: Listening, folder: Path, error: Exception
) -> None:
    def refuse(nbytes: int, timeout: float, number: int | None) -> None:
        raise error

    listening(refuse)
    with pytest.raises(ControlRefused) as caught:
        ask(ME, 2**20, 1, [folder])
    assert (caught.value.pid, caught.value.kind) == (ME, type(error).__name__)
    assert str(caught.value) == f"process {ME} refused: {str(error).removeprefix('ballonet: ')}"
    assert ask(ME, None, 1, [folder])["pid"] == ME, "it goes on listening"


def test_without_a_device_it_refuses(listening: Listening, folder: Path) -> None:
    listening()
    with pytest.raises(ControlRefused, match=r"ballonet\.install\(\)"):
        ask(ME, None, 1, [folder])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "line",
    [b"hello\n", b"[]\n", b"{}\n", b'{"budget": 5}\n', b"\xff\xfe\n", b"3\n", b"null\n"],
)
def test_line_that_is_no_request_is_said_to_be_none(listening: Listening, line: bytes) -> None:
    answer = json.loads(said(listening().path, line))
    assert answer == {"ok": False, "kind": "ValueError", "message": "the request is not understood"}


@pytest.mark.usefixtures("installed")
def test_a_client_that_goes_or_talks_too_long_harms_nobody(listening: Listening, folder: Path) -> None:
    path = listening().path
    assert said(path, b"") == b""
    assert said(path, b'{"budget"') == b""
    assert said(path, b'{"budget": null, ' + b" " * 100_000 + b'"timeout": 1}\n') == b""
    request = b'{"budget": null, "timeout": 1}\n'
    assert json.loads(said(path, request[:9], request[9:]))["ok"], "in pieces is fine"
    assert ask(ME, None, 1, [folder])["pid"] == ME


@pytest.mark.usefixtures("installed")
def test_another_user_is_not_answered(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    path = listening().path
    monkeypatch.setattr(control, "_peer", lambda connection: (1, os.geteuid() + 1))
    assert said(path, b'{"budget": null, "timeout": 1}\n') == b""


# -- where it listens


def test_nobody_else_can_enter_the_folder(listening: Listening, folder: Path) -> None:
    before = os.umask(0)
    try:
        path = listening().path
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert path == folder / f"{ME}.sock"


@pytest.mark.parametrize("how", ["link", "file", "other"])
def test_a_folder_that_is_another_s_is_not_used(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second = folder.parent / "t"
    if how == "link":
        (folder.parent / "real").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "real")
    elif how == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
        gives_away(folder, monkeypatch)
    with pytest.raises(OSError, match=r"it is a link|File exists|it belongs to user"):
        Control(lambda nbytes, timeout, number: None, [folder])
    if how != "other":
        opened = Control(lambda nbytes, timeout, number: None, [folder, second])
        assert opened.path.parent == second
        opened.close()


def test_a_folder_that_others_can_enter_is_narrowed(listening: Listening, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.warns(RuntimeWarning, match=r"could be read by others \(750\): it is narrowed to its user"):
        listening()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.usefixtures("installed")
def test_a_folder_may_have_a_long_name(folder: Path) -> None:
    deep = folder.parent / ("d" * 120)
    opened = Control(lambda nbytes, timeout, number: None, [deep])
    assert ask(ME, None, 1, [deep])["pid"] == ME
    assert control.listening([deep]) == [ME]
    opened.close()
    assert list(deep.iterdir()) == []


def test_sockets_of_the_dead_go_and_all_else_stays(listening: Listening, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    dead, other = gone(), gone()
    stay = [f"{ME}.sock", "1.sock", "note.txt", "x.sock", f"{other}.sock"]
    for name in (f"{dead}.sock", *stay[:4]):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / name))
    (folder / stay[4]).touch()  # no socket
    listening()
    assert sorted(path.name for path in folder.iterdir()) == sorted(stay)
    assert stat.S_ISSOCK((folder / f"{ME}.sock").stat().st_mode), "what had our pid before us is no socket of ours"


def test_when_it_ends_nothing_is_left(listening: Listening, folder: Path) -> None:
    before = {*threading.enumerate()}  # that of a test before may be ending yet
    opened = listening()
    (thread,) = {*threading.enumerate()} - before
    opened.close()
    assert list(folder.iterdir()) == []
    thread.join(600)
    assert not thread.is_alive()
    with pytest.raises(NotReachable, match=f"process {ME} does not listen: "):
        ask(ME, None, 1, [folder])
    later = listening()
    opened.close()
    assert later.path.exists(), "it has ended already"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("grace", [60, 0.01])
def test_the_end_waits_for_an_answer_that_is_being_made_and_not_for_ever(
    listening: Listening, folder: Path, grace: float
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def set_budget(nbytes: int, timeout: float, number: int | None) -> None:
        begun.set()
        assert goes_on.wait(600)

    opened = listening(set_budget, grace=grace)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(ask, ME, 2**20, 60, [folder])
        assert begun.wait(600)
        closing = threads.submit(opened.close)
        ended, _ = wait([closing], timeout=0.1 if grace == 60 else 600)
        assert bool(ended) is (grace < 60)
        goes_on.set()
        closing.result()
        assert grace < 60 or answer.result()["pid"] == ME
    with pytest.raises(NotReachable):
        ask(ME, None, 1, [folder])


# -- who is asked


def test_there_is_no_such_process() -> None:
    with pytest.raises(NoSuchProcess, match="does not exist: give the pid") as caught:
        ask(gone(), None, 1, [])
    assert isinstance(caught.value, ControlError)


def test_a_process_of_another_user_is_not_asked(
    listening: Listening, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening()
    user = os.geteuid()
    monkeypatch.setattr(control.os, "geteuid", lambda: user + 1)
    with pytest.raises(NotPermitted, match=f"belongs to user {user}: run this command as that user"):
        ask(ME, None, 1, [folder])


def test_a_socket_of_another_process_under_this_pid_is_not_believed(listening: Listening, folder: Path) -> None:
    os.rename(listening().path, folder / "1.sock")
    with pytest.raises(NotReachable if os.geteuid() == 0 else NotPermitted):
        ask(1, None, 1, [folder])


@pytest.mark.usefixtures("installed")
def test_one_that_does_not_answer_is_given_up(listening: Listening, folder: Path) -> None:
    goes_on = threading.Event()
    listening(lambda nbytes, timeout, number: goes_on.wait(600) and None)
    with pytest.raises(NotReachable, match=r"did not answer .*: it may be ending"):
        ask(ME, 2**20, 0.01, [folder], patience=0.01)
    goes_on.set()


def test_folders_are_those_where_the_other_one_may_have_been_started(tmp_path: Path) -> None:
    user = os.geteuid()
    chosen = control_dirs({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert chosen[0] == tmp_path / "ballonet"
    assert Path(tempfile.gettempdir(), f"ballonet-{user}") in chosen
    for unusable in ("", "relative", str(tmp_path / "none")):
        dirs = control_dirs({"XDG_RUNTIME_DIR": unusable})
        assert dirs == tuple(path for path in chosen if path != chosen[0])
    assert len(set(chosen)) == len(chosen)


# -- as users meet it

PROGRAM = """
import os, sys, ballonet
from ballonet.allocator import control
ballonet.install("8MiB", page_size=65536, device="cpu")
parent = os.getpid()
if os.fork() == 0:
    try:
        control.ask(os.getpid(), None, 1)
    except ballonet.BallonetError as error:
        print(type(error).__name__, control.ask(parent, None, 1)["budget"], flush=True)
    sys.exit()
os.wait()
for line in sys.stdin:
    print(ballonet.stats().budget, flush=True)
ballonet.restore()
print(sorted(os.listdir(sys.argv[1])), flush=True)
ballonet.install()
os.environ["BALLONET_CONTROL"] = "0"
"""


def test_the_budget_of_a_running_process(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown and changed from another process; its child after a fork has no say, nor takes the parent's away."""
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder / "ballonet")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == f"NotReachable {2**23}\n"
    pid = str(process.pid)

    assert main(["budget", pid]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["pid"], told["budget"], told["page_size"]) == (process.pid, 2**23, PAGE)

    assert main(["budget", pid, "4MiB", "--timeout", "30s"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == 2**22
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{2**22}\n"

    assert main(["budget", pid, "1KiB"]) == 1
    assert capsys.readouterr().err.startswith(f"ballonet: process {pid} refused: the budget is 1KiB, which is less ")
    assert main(["budget", pid, "much"]) == 2
    assert "size is 'much'" in capsys.readouterr().err

    output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (0, "[]\n"), "restore() ends it"
    assert list((folder / "ballonet").iterdir()) == [], "and so does the end of the process"
    assert main(["budget", pid]) == 1
    assert "does not exist" in capsys.readouterr().err


SLEEPER = """
import sys
import ballonet
from tests.models import build
ballonet.install(budget=2**24, page_size=65536, device="cpu")
models = [build("llama"), build("llama")]
handles = [ballonet.manage(model) for model in models]
for line in sys.stdin:
    print([handle.asleep for handle in handles], ballonet.stats().pages.weights > 0, flush=True)
"""


def test_models_of_a_running_process_sleep_and_wake_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SLEEPER],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def levels() -> str:
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return process.stdout.readline()  # type: ignore[union-attr]

    pid = str(process.pid)
    assert levels() == "[0, 0] True\n"
    assert main(["sleep", pid, "LlamaForCausalLM (2)", "--level", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["pages"]["weights"] > 0
    assert levels() == "[0, 2] True\n"
    assert main(["sleep", pid]) == 0
    assert json.loads(capsys.readouterr().out)["pages"]["weights"] == 0
    assert levels() == "[1, 1] False\n"
    assert main(["wake", pid, "LlamaForCausalLM"]) == 0
    assert levels() == "[0, 1] True\n"
    capsys.readouterr()
    assert main(["sleep", pid, "other"]) == 1
    assert "no model other is managed there: LlamaForCausalLM, LlamaForCausalLM (2)" in capsys.readouterr().err
    process.communicate(timeout=600)


def test_a_process_without_models_says_so(listening: Listening, folder: Path, installed: None) -> None:
    listening()
    with pytest.raises(ControlRefused, match="no model is managed there"):
        control.ask_to_act(ME, "sleep", {"model": None}, 5, [folder])


def test_control_can_be_turned_off_and_a_process_without_a_place_for_it_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "control_dirs", lambda: (folder,))
    monkeypatch.setenv("BALLONET_CONTROL", "0")
    ballonet.install("8MiB", page_size=PAGE, device="cpu")
    ballonet.restore()
    assert not folder.exists()
    monkeypatch.setenv("BALLONET_CONTROL", "1")
    folder.touch()
    with pytest.warns(RuntimeWarning, match=r"cannot reach this process: .*BALLONET_CONTROL=0"):
        ballonet.install("8MiB", page_size=PAGE, device="cpu")
    ballonet.restore()


@pytest.mark.usefixtures("installed")
def test_listener_answers_again_after_it_was_out_of_file_descriptors(listening: Listening, folder: Path) -> None:
    path = listening().path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        waiting.settimeout(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting.connect(str(path))  # if it waits for this one it has a descriptor, and gets none for the next
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            waiting.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                waiting.recv(4096)
            time.sleep(0.3)  # it has tried by then; that it answers below is what is asked
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ask(ME, None, 30, [folder])
