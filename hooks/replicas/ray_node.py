"""The Ray under replicas: one of this machine that is started and ended here, or a cluster that is joined.

Note [Who comes in]
    Whoever reaches a port of a Ray without authentication runs code there. So a Ray that is started here listens on the
    loopback address only and has a random token, and a cluster without a token is refused. Replicas use none of Ray's
    memory of objects, so that is as small as it can be; Ray's monitor would kill processes whose host pages it counts,
    and is off, as are its dashboard and its statistics of usage.

Note [Nothing is left]
    Processes of Ray end with the process that started them, but its agents look only every now and then, and never if
    that was killed. So a keeper, which this process starts first and which waits for its end, kills what is left: the
    processes with a variable of this Ray in their environment. Then it removes Ray's folder.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from ...allocator.config import change_environment, environment
from .errors import SecretRefused, SupervisorLost

_STORE: Final = 75 * 2**20  # bytes of Ray's memory of objects, its minimum
_OF_THIS: Final = "BALLONET_RAY"  # a variable of all processes of a Ray that was started here
_TOKEN: Final = "RAY_AUTH_TOKEN"
_ALWAYS: Final = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
# Ray has no setting for the loopback address: it uses that where clusters of several machines are not supported.
_LOOPBACK: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ADDRESS": None}
_LOCAL: Final = ("127.0.0.1", "localhost")
_SERVING: Final = {"RAY_worker_niceness": "0"}  # Ray's own is 15: batch jobs beside what serves
_KEEPER: Final = """
import os, shutil, signal, sys, time
mark, folder = sys.argv[1].encode(), sys.argv[2]
sys.stdin.read()
def left():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read():
                    yield int(name)
        except OSError:
            pass
while found := [*left()]:
    for process in found:
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.02)
shutil.rmtree(folder, ignore_errors=True)
"""


class RayNode:
    """A connection to Ray, one per process. To be closed. See the notes above."""

    def __init__(self, address: str | None, replicas: int, gpus: int, patience: float) -> None:
        """Starts a Ray, or joins the cluster at `address`. `replicas`, `gpus`: that a started one has room for;
        `patience`: seconds that one to be joined has to answer. To be made on the main thread. SecretRefused;
        SupervisorLost: no cluster answers; ModuleNotFoundError."""
        self._keeper: subprocess.Popen[bytes] | None = None
        change_environment(_ALWAYS)
        if address is None:
            self._start(replicas, gpus)
        else:
            self._join(address, patience)

    def close(self) -> None:
        """Leaves Ray, and ends it where it was started here. Idempotent."""
        import ray

        ray.shutdown()
        if self._keeper is not None:
            self._keeper.communicate()

    def _start(self, replicas: int, gpus: int) -> None:
        mark, before = secrets.token_hex(16), environment()
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # of a short path: that of a socket has 107 bytes
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", "-c", _KEEPER, f"{_OF_THIS}={mark}", folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            change_environment({**_LOOPBACK, **_SERVING, _OF_THIS: mark, _TOKEN: secrets.token_hex(32)})
            _init(
                include_dashboard=False,
                object_store_memory=_STORE,
                num_cpus=replicas + 1,
                num_gpus=gpus,
                _temp_dir=folder,
            )
        except BaseException:
            self._keeper.communicate()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            change_environment({_OF_THIS: before.get(_OF_THIS)})

    def _join(self, address: str, patience: float) -> None:
        has = environment()
        path = Path(has.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        if not has.get(_TOKEN) and not path.exists():
            raise SecretRefused(
                f"whoever reaches a Ray without authentication runs code there, and no token for that at {address} was "
                f"given: set {_TOKEN}, or have it in {path}"
            )
        host, _, port = address.rpartition(":")
        if host in _LOCAL:
            change_environment(_LOOPBACK)
        try:
            socket.create_connection((host, int(port)), patience).close()  # Ray would try for minutes
            _init(address=address)
        except (ValueError, OSError, RuntimeError) as error:
            raise SupervisorLost(
                f"no Ray at {address} lets this process in: see that it runs, and that the token is its own"
            ) from error
        import ray

        if not ray.get(ray.remote(num_cpus=0, num_gpus=0)(_asks_for_token).remote()):
            ray.shutdown()
            raise SecretRefused(
                f"the Ray at {address} asks for no token, so whoever reaches it runs code there: start it with "
                "RAY_AUTH_MODE=token"
            )


def _init(**arguments: Any) -> None:
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR", **arguments)


def _asks_for_token() -> bool:
    """Returns whether the Ray in which this runs asks for a token."""
    from ray._raylet import AuthenticationMode, get_authentication_mode

    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)
