"""Control from outside: `ballonet budget` and `top` watch a running process and change its budget.

Each process in which ballonet is installed listens at a socket of its own, named by its pid, in a folder that only its
user can enter (trusted.py). A request is one line of JSON, and so is its answer: `{"budget": null | bytes, "timeout":
seconds}` has `{"ok": true, ...}` with `describe`'s keys, `{"look": null | cursor}` has it with those of `looks.look`;
`{"give": bytes, "timeout": seconds}` has a process that shares a budget give what it has above that, with `describe`'s
keys; `{"act": name, "given": {...}}` has it do what was offered by that name (`offer`), with the same keys; or it is
`{"ok": false, "kind": the error's class, "message": ...}`. All may name a runtime of the process by its number,
`"device": null | number`, else they are about the first.

Note [The end of a process]
    The thread is a daemon: it ends with the process, whatever it waits for. Until Python 3.14 a daemon that returns
    from native code while the interpreter ends takes the process down with an error. So at exit, and in `close`, an
    answer that is being made is waited for, but not for long.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from . import devices
from .config import control_dirs
from .defaults import CONTROL_AGAIN, CONTROL_GRACE, CONTROL_PATIENCE
from .devices import Runtime
from .errors import ControlRefused, ManageError, NoSuchProcess, NotPermitted, NotReachable
from .looks import KEYS
from .looks import look as look_here
from .trusted import TrustedFolder

LONGEST: Final = 4096  # bytes of a request
LONGEST_ANSWER: Final = 1 << 20  # bytes

SHOWN: Final = ("budget", "page_size", "pages", "host_pages", "peer", "peer_budget", "peer_pages", "spilled")

SetBudget = Callable[[int, float, int | None], None]  # bytes, timeout in seconds, the runtime's number


def describe(number: int | None = None) -> dict[str, Any]:
    """Returns pid, budget and page_size in bytes, pages by owner, host_pages, peer (where), its budget in bytes and its
    pages, spilled ones. `number`: of the runtime, None for the first. NotInstalled."""
    snapshot = devices.of(number).device.snapshot()
    return {"pid": os.getpid(), **{key: snapshot[key] for key in SHOWN}}


class _Acts(dict[str, Callable[..., object]]):
    """What may be done with one runtime from outside, by name."""


def offer(runtime: Runtime, name: str, act: Callable[..., object]) -> None:
    """Lets processes of this user have `act(**given)` called, see `ask_to_act`. The last one of a name counts."""
    runtime.parts.of(_Acts, _Acts)[name] = act


def _act(name: str, given: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    offered = devices.of(number).parts.get(_Acts) or _Acts()
    if name not in offered:
        raise ManageError("no model is managed there")
    offered[name](**given)
    return describe(number)


class Control:
    """The listening end, until `close()`. OSError where there is no place for its socket."""

    def __init__(self, set_budget: SetBudget, folders: Sequence[Path], grace: float = CONTROL_GRACE) -> None:
        """`grace`: seconds that `close()` waits for an answer that is being made."""
        self._grace = grace
        self._set_budget = set_budget
        self._closed = False
        self._busy = threading.Lock()  # held while an answer is made
        self._socket, self._folder = _listen(folders)
        self._name = f"{os.getpid()}.sock"
        self.path: Final = self._folder.path / self._name
        threading.Thread(target=self._serve, name="ballonet-control", daemon=True).start()

    def close(self) -> None:
        """Ends answering and removes the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            (self._folder.here / self._name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if self._busy.acquire(timeout=self._grace):
            self._busy.release()

    def forget(self) -> None:
        """Drops the socket in a child after a fork: the parent keeps it, the child has no thread."""
        self._socket.close()

    def _serve(self) -> None:
        with self._socket:
            while True:
                try:
                    connection, _ = self._socket.accept()
                except OSError:
                    if self._closed:
                        return
                    time.sleep(CONTROL_AGAIN)  # out of file descriptors: the client waits meanwhile
                    continue
                with contextlib.suppress(OSError), connection:  # the client may go at any time
                    self._serve_one(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        connection.settimeout(CONTROL_PATIENCE)
        if _peer(connection)[1] != os.geteuid():
            return
        line = _line(connection, LONGEST)
        with self._busy:
            if not self._closed:
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            number = _whole(request.get("device"))
            if "look" in request:
                act = partial(look_here, _whole(request["look"]), number)
            elif "act" in request:
                act = partial(_act, str(request["act"]), dict(request["given"]), number)
            elif "give" in request:
                act = partial(_give, int(request["give"]), float(request["timeout"]), number)
            else:
                act = partial(self._budget, request["budget"], request["timeout"], number)
        except (ValueError, TypeError, KeyError, AttributeError):
            return {"ok": False, "kind": "ValueError", "message": "the request is not understood"}
        try:
            return {"ok": True, **act()}
        except Exception as error:
            return {"ok": False, "kind": type(error).__name__, "message": str(error).removeprefix("ballonet: ")}

    def _budget(self, budget: Any, timeout: Any, number: int | None) -> dict[str, Any]:
        if budget is not None:
            self._set_budget(int(budget), float(timeout), number)
        return describe(number)


_control: Control | None = None


def start(set_budget: SetBudget) -> None:
    """Has this process listen, if it does not yet. OSError."""
    global _control
    if _control is None:
        _control = Control(set_budget, control_dirs())


def stop() -> None:
    """Ends listening."""
    global _control
    control, _control = _control, None
    if control is not None:
        control.close()


def _forget() -> None:
    global _control
    if _control is not None:
        _control.forget()
        _control = None


atexit.register(stop)
os.register_at_fork(after_in_child=_forget)


def ask(
    pid: int,
    budget: int | None,
    timeout: float,
    folders: Sequence[Path] | None = None,
    patience: float = CONTROL_PATIENCE,
    device: int | None = None,
) -> dict[str, Any]:
    """Returns what `describe` does in another process of this user, after changing its budget to so many bytes, unless
    None.

    `timeout`: seconds that it may take to get pages back; `patience`: that a line may take; `device`: the number of the
    runtime, None for its first. Raises NoSuchProcess, NotPermitted, NotReachable, and ControlRefused with what it said.
    """
    request = {"budget": budget, "timeout": timeout, "device": device}
    return _asked(pid, request, timeout + 2 * patience, folders, patience)


def look(
    pid: int,
    since: int | None = None,
    folders: Sequence[Path] | None = None,
    patience: float = CONTROL_PATIENCE,
    device: int | None = None,
) -> dict[str, Any]:
    """Returns what `looks.look` does in another process of this user. Raises as `ask`; NotReachable where that runs
    another version of ballonet."""
    report = _asked(pid, {"look": since, "device": device}, patience, folders, patience)
    if not report.keys() >= {*KEYS}:
        raise NotReachable(pid, "runs another version of ballonet: watch it with the `ballonet top` of that one")
    return report


def listening(folders: Sequence[Path] | None = None) -> list[int]:
    """Returns the pids of this user's processes that have a socket, in ascending order. Some may not answer."""
    pids = set[int]()
    for folder in control_dirs() if folders is None else folders:
        with contextlib.suppress(OSError):
            sockets = _sockets(TrustedFolder(folder, make=False))
            pids.update(pid for pid in sockets if _owner(pid) == os.geteuid())
    return sorted(pids)


def _asked(
    pid: int, request: dict[str, Any], seconds: float, folders: Sequence[Path] | None, patience: float
) -> dict[str, Any]:
    """Sends a request and returns the answer, which may take so many `seconds`. Raises as `ask`."""
    _check_owner(pid)
    with _connected(pid, control_dirs() if folders is None else folders, patience) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(_line(connection, LONGEST_ANSWER))
        except (OSError, ValueError) as error:
            raise NotReachable(
                pid, f"did not answer ({error}): it may be ending, or busy with another request; try again"
            ) from None
    if answer.pop("ok"):
        return dict(answer)
    raise ControlRefused(pid, answer["message"], answer["kind"])


def ask_to_give(
    pid: int,
    nbytes: int,
    timeout: float,
    folders: Sequence[Path] | None = None,
    patience: float = CONTROL_PATIENCE,
    device: int | None = None,
) -> dict[str, Any]:
    """Has another process of this user, which shares a budget, give pages until it has no more than so many bytes, or
    as few as it can within `timeout` seconds. Returns and raises as `ask`."""
    request = {"give": nbytes, "timeout": timeout, "device": device}
    return _asked(pid, request, timeout + patience, folders, patience)


def ask_to_act(
    pid: int,
    name: str,
    given: Mapping[str, Any],
    timeout: float,
    folders: Sequence[Path] | None = None,
    patience: float = CONTROL_PATIENCE,
) -> dict[str, Any]:
    """Has another process of this user do what it has offered by that name, within `timeout` seconds. Returns and
    raises as `ask`."""
    return _asked(pid, {"act": name, "given": dict(given)}, timeout + 2 * patience, folders, patience)


def _give(nbytes: int, timeout: float, number: int | None) -> dict[str, Any]:
    shared = devices.of(number).shared
    if shared is not None:
        shared.give(nbytes, timeout)
    return describe(number)


def _check_owner(pid: int) -> None:
    owner = _owner(pid)
    if owner is None:
        raise NoSuchProcess(pid, "does not exist: give the pid of a running process, as ps shows it")
    if owner != os.geteuid():
        raise NotPermitted(pid, f"belongs to user {owner}: run this command as that user")


def _owner(pid: int) -> int | None:
    """Returns the user of a process; None where there is none."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _connected(pid: int, folders: Sequence[Path], patience: float) -> socket.socket:
    for path in folders:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            folder = TrustedFolder(path, make=False)
            _clean(folder)
            connection.settimeout(patience)
            connection.connect(str(folder.here / f"{pid}.sock"))
            if _peer(connection) == (pid, os.geteuid()):
                return connection
        except OSError:
            pass
        connection.close()
    raise NotReachable(
        pid, "does not listen: ballonet.install() was not called in it, or it was started with BALLONET_CONTROL=0"
    )


def _listen(folders: Sequence[Path]) -> tuple[socket.socket, TrustedFolder]:
    """Returns a socket, and the first usable folder, in which it is. OSError with the reasons where none is."""
    reasons = []
    for path in folders:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            folder = TrustedFolder(path)
            _clean(folder)
            place = folder.here / f"{os.getpid()}.sock"
            place.unlink(missing_ok=True)  # of a process that had this pid before
            listening.bind(str(place))
            listening.listen()
            return listening, folder
        except OSError as error:
            listening.close()
            reasons.append(str(error))
    raise OSError("; ".join(reasons))


def _sockets(folder: TrustedFolder) -> list[int]:
    """Returns the pids of which a folder has sockets of this user. OSError."""
    pids = []
    with os.scandir(folder.here) as entries:
        for entry in entries:
            name, _, suffix = entry.name.rpartition(".")
            if suffix == "sock" and name.isdecimal():
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
                    pids.append(int(name))
    return pids


def _clean(folder: TrustedFolder) -> None:
    """Removes this user's sockets of processes that are gone."""
    with contextlib.suppress(OSError):
        for pid in _sockets(folder):
            if not os.path.exists(f"/proc/{pid}"):
                (folder.here / f"{pid}.sock").unlink(missing_ok=True)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Returns pid and user of the other end."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def _whole(value: Any) -> int | None:
    """Returns the number in a request, None for none. TypeError, ValueError."""
    return None if value is None else int(value)


def _line(connection: socket.socket, longest: int) -> bytes:
    """Reads a line. OSError where its end does not come, or it is too long."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(longest)
        line += part
        if not part or len(line) > longest:
            raise OSError("the line did not end")
    return line
