"""A port that serves the metrics of this process to Prometheus, `ballonet.metrics.serve()`, and sockets that
listen.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

from ...allocator.errors import ConfigError, ExtraMissing, PortInUse


class Endpoint:
    """A port that is served by a thread, until `close()`. `host` and `port`: where."""

    def __init__(self, host: str, server: Any, thread: threading.Thread) -> None:
        """`server`: an HTTPServer, which `thread` runs."""
        self.host = host
        self.port = int(server.server_port)
        self._server = server
        self._thread = thread

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        return f"http://{self.host}:{self.port}/metrics"

    def close(self) -> None:
        """Frees the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<metrics at {self.url}>"


def serve(port: int, host: str = "127.0.0.1") -> Endpoint:
    """Serves the metrics of this process at `http://host:port/metrics` until the returned object is closed, or the
    process ends. They are empty before `install()`.

    `port`: 0 for any free one. `host`: "0.0.0.0" serves other machines, too, without any check. PortInUse; ConfigError
    where it cannot listen there; ExtraMissing without prometheus-client.
    """
    try:
        from prometheus_client import start_http_server

        from .registry import REGISTRY
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("prometheus_client"):
            raise
        raise ExtraMissing("metrics", "prometheus-client", "metrics") from error
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
        raise ConfigError(f"port is {port!r}, which is no port: write a whole number from 0 to 65535")
    try:
        return Endpoint(host, *start_http_server(port, host, REGISTRY))
    except OSError as error:
        raise refused(host, port, error) from error


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens at all addresses of a host that this machine has. PortInUse, ConfigError."""
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise refused(host, port, error) from error
    for family, *_, address in places:
        try:
            sockets.append(socket.create_server(address, family=family, backlog=1024))
        except OSError as error:  # a name may have an address of IPv6 where there is none
            failures.append(error)
    taken = [error for error in failures if error.errno == errno.EADDRINUSE]
    if taken or not sockets:
        for listener in sockets:
            listener.close()
        raise refused(host, port, (taken or failures)[0]) from failures[0]
    return sockets


def refused(host: str, port: int, error: OSError) -> ConfigError:
    """Returns the typed error for an OSError of listening there, with a remedy."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(host, port)
    why = str(error) if error.errno is None or isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return ConfigError(
        f"nothing can listen at {host}:{port}: {why}. Choose an address of this machine, and a port above 1023"
    )
