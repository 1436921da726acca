"""Checks whether a port is free to listen at, and words the error where it is not."""

from __future__ import annotations

import errno
import os
import socket

from ...allocator.errors import ConfigError, PortInUse


def check_free(host: str, port: int) -> None:
    """Listens at the port for a moment, before slow work begins. PortInUse, ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise refused(host, port, error) from error


def refused(host: str, port: int, error: OSError) -> ConfigError:
    """Returns the typed error for an OSError of listening there, with a remedy."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(host, port)
    why = str(error) if error.errno is None or isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return ConfigError(
        f"nothing can listen at {host}:{port}: {why}. Choose an address of this machine, and a port above 1023"
    )
