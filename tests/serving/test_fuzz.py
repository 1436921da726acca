"""Requests that schemathesis makes of a server's description. The same, of a model, are in test_ordeal.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fuzz import fuzz
from .scripted import NAME, Scene

pytest.importorskip("schemathesis", reason="schemathesis is not installed: `make soak PART=serve` needs it, too")


def test_no_request_is_a_fault_of_the_server(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        statuses = fuzz(scene.url, scene.key, NAME, 20)
        assert min(statuses[200], statuses[400], statuses[404]) > 10, statuses
        assert scene.post("completions", {"prompt": "a"})[0] == 200
    finally:
        scene.end()
