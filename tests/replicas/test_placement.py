"""The GPU of each replica, and which servers with replicas are refused."""

from __future__ import annotations

import importlib.util

import pytest

from ballonet.__main__ import main
from ballonet.hooks.replicas import child_processes


def test_gpus_are_dealt_to_replicas_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("KEPT", "1")
    assert "CUDA_VISIBLE_DEVICES" not in child_processes.placed(1, 0)
    found = child_processes.placed(3, 2)
    assert (found["KEPT"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert child_processes.placed(1, 2)["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize(
    ("options", "environ", "why"),
    [
        (["another", "--replicas", "2"], {}, "of one model"),
        (["--replicas", "2", "--prefix-cache"], {}, "share no prefixes"),
        (["--replicas", "2"], {"BALLONET_PREFIX_DIR": "/tmp"}, "share no prefixes"),
    ],
)
def test_what_cannot_start_is_refused_before_anything_is_loaded(
    options: list[str],
    environ: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "/no/model", *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_where_ray_is_not_installed_it_is_said_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/model", "--ray", "127.0.0.1:6379"]) == 1
    assert "pip install 'ballonet[replicas]'" in capsys.readouterr().err
