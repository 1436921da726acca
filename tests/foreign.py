"""Files and folders of another user, for tests of what is trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OTHER = 65534


def gives_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives it to another user. Only root can: for others this process is another user's from now on, until the test
    ends."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, OTHER)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
