"""Names of requests, which clients choose as `x-request-id`: those that run at a time have different ones.

Note [One name, two requests]
    Answers find their client by the name of the request. Of two with one name the later would have the answers of both,
    and the earlier none. A proxy that sends a request again does so with the same name, so this happens.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import HTTPException


def check_ended(name: str, runs: Callable[[str], bool]) -> None:
    """Refuses a request another of whose name has not ended. See Note [One name, two requests]. `runs(name)`: is there
    such a one? HTTPException 409."""
    if runs(name):
        raise HTTPException(409, f"a request with the x-request-id {name!r} has not ended: give another one")
