"""Ports that this process is to listen at: whether one is free, and what is wrong where it is not."""

from __future__ import annotations

import errno
import os
import socket

from ...allocator.errors import ConfigError, PortInUse


def check_free(host: str, port: int) -> None:
    """Listens there for a moment, before anything else takes its time. PortInUse, ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise refused(host, port, error) from error


def refused(host: str, port: int, error: OSError) -> ConfigError:
    """Returns what an error of listening there means, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(host, port)
    why = str(error) if error.errno is None or isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return ConfigError(
        f"nothing can listen at {host}:{port}: {why}. Choose an address of this machine, and a port above 1023"
    )
