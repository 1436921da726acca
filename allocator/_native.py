"""Replaces the native core where that was not built: any attribute raises CoreMissing.

The core is an extension module of the same name beside this file, which Python prefers. Modules that only mention the
core can be imported, so that functions that need no pages work without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from .errors import CoreMissing


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    note = Path(__file__).with_name("without_core.txt")  # setup.py, Note [Without a compiler]
    why = f"when ballonet was installed, {note.read_text()}" if note.exists() else "it has not been built here"
    raise CoreMissing(
        f"ballonet's native core is missing: {why}. Without it there is no pool of pages: install(), manage(), run and "
        "serve cannot work; info and load do. To go on: install a C++17 compiler and Python's headers "
        "(Debian: apt install g++ python3-dev), then pip install --force-reinstall --no-cache-dir ballonet "
        "(in a checkout: make build)"
    )
