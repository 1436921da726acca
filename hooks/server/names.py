"""Names of requests, which clients choose as `x-request-id`: running requests have different ones.

Note [One name, two requests]
    Answers are sent to clients by the name of the request. Of two requests with one name the later would get the
    answers of both, and the earlier none. It happens: a proxy repeats a request with the same name.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import HTTPException


def check_ended(name: str, runs: Callable[[str], bool]) -> None:
    """Refuses a request with the name of another that has not ended, see Note [One name, two requests]. `runs(name)`:
    does one of that name run? HTTPException 409."""
    if runs(name):
        raise HTTPException(409, f"a request with the x-request-id {name!r} has not ended: give another one")
