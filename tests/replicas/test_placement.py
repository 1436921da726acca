"""Where the supervisor is said to be, and the GPU of each replica."""

from __future__ import annotations

import argparse

import pytest

from ballonet.__main__ import main
from ballonet.cli.serve_replicas import Placement, placed
from ballonet.hooks.options import ManageOptions
from ballonet.hooks.replicas import child_processes


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, None),
        ({"replicas": 2}, Placement("127.0.0.1", 0, hosts=True)),
        ({"replicas": 2, "listen": "node0:29400"}, Placement("node0", 29400, hosts=True)),
        ({"join": "node0:29400"}, Placement("node0", 29400, hosts=False)),
        ({"join": "[fe80::1]:1"}, Placement("fe80::1", 1, hosts=False)),
    ],
)
def test_options_say_where_the_supervisor_is(
    given: dict[str, str], found: Placement | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALLONET_REPLICA_SECRET", "a secret")
    args = argparse.Namespace(models=["model"], **{"join": None, "listen": None, "replicas": None} | given)
    assert placed(args, ManageOptions()) == found


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
        *[
            (["--join", where], {}, "no HOST:PORT")
            for where in ("node0", ":29400", "node0:0", "node0:65536", "a:²", "")
        ],
        (["--replicas", "1", "--listen", "node0"], {}, "--listen is 'node0', which is no HOST:PORT"),
        (["--join", "node0:1"], {}, "set BALLONET_REPLICA_SECRET"),
        (["--replicas", "2", "--listen", "node0:1"], {}, "set BALLONET_REPLICA_SECRET"),
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
