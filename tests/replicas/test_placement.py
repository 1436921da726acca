"""Where the supervisor is said to be, and its store there."""

from __future__ import annotations

import socket
import threading

import pytest

from ballonet.__main__ import main
from ballonet.hooks.replicas.child_processes import placed
from ballonet.hooks.replicas.errors import NoAnswer, PlacementError, SupervisorLost, SupervisorPortInUse
from ballonet.hooks.replicas.placement import Placement, as_replica, placement
from ballonet.hooks.replicas.rendezvous import open_store
from ballonet.hooks.replicas.store import Store

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
LONG = 120.0


@pytest.mark.parametrize(
    ("environ", "join", "found"),
    [
        ({}, None, Placement("127.0.0.1", 0, hosts=True)),
        ({"RANK": ""}, None, Placement("127.0.0.1", 0, hosts=True)),
        ({}, "node0:29400", Placement("node0", 29400, hosts=False)),
        ({}, "[fe80::1]:1", Placement("fe80::1", 1, hosts=False)),
        (TORCHRUN, "other:7", Placement("other", 7, hosts=False)),
        (TORCHRUN, None, Placement("node0", 29400, False, 2, 4)),
        ({**TORCHRUN, "RANK": "0"}, None, Placement("node0", 29400, True, 0, 4)),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            None,
            Placement("node0", 29400, False, 2, 4, agent=True),
        ),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, None, Placement("node0", 29400, False, 2, 4)),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, None, Placement("node0", 29400, False, 2, 4, local=1)),
    ],
)
def test_placements(environ: dict[str, str], join: str | None, found: Placement) -> None:
    assert placement(environ, join) == found


@pytest.mark.parametrize(
    ("environ", "join", "why"),
    [
        ({}, "node0", "no HOST:PORT"),
        ({}, ":29400", "no HOST:PORT"),
        ({}, "node0:0", "no HOST:PORT"),
        ({}, "node0:65536", "no HOST:PORT"),
        ({}, "node0:²", "no HOST:PORT"),
        ({}, "", "no HOST:PORT"),
        ({"RANK": "0", "MASTER_PORT": "1"}, None, "has RANK, MASTER_PORT but not WORLD_SIZE, MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "one"}, None, "RANK is 'one'"),
        ({**TORCHRUN, "RANK": "4"}, None, "RANK=4, WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, None, "RANK=-1"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, None, "MASTER_PORT=70000"),
    ],
)
def test_what_is_no_placement_is_refused(environ: dict[str, str], join: str | None, why: str) -> None:
    with pytest.raises(PlacementError, match=why):
        placement(environ, join)


def test_a_replica_has_one_gpu_and_is_no_rank() -> None:
    """torchrun's variables are unset, and no others."""
    environ = {**TORCHRUN, "LOCAL_RANK": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "7", "OMP_NUM_THREADS": "1"}
    forgotten = dict.fromkeys([*TORCHRUN, "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"])
    assert as_replica(environ, 1, 0) == forgotten
    assert as_replica(environ, 1, 2) == forgotten | {"CUDA_VISIBLE_DEVICES": "1"}
    assert as_replica({}, 3, 2) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert as_replica({"CUDA_VISIBLE_DEVICES": "4,6"}, 1, 2) == {"CUDA_VISIBLE_DEVICES": "6"}


def test_a_child_of_the_supervisor_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "TORCHELASTIC_RUN_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEPT", "1")
    found = placed(1, 2)
    assert (found["KEPT"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "1")
    assert {*TORCHRUN, "TORCHELASTIC_RUN_ID"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("options", "environ", "why"),
    [
        (["--replicas", "3"], {**TORCHRUN, "BALLONET_REPLICA_SECRET": "s"}, "--replicas is 3, but torchrun starts 4"),
        (["--replicas", "4"], TORCHRUN, "set BALLONET_REPLICA_SECRET"),
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


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SupervisorPortInUse, match=rf"127\.0\.0\.1:{port}: end it .*another port, or port 0"):
            Store.host(port=port, timeout=LONG)
    store = Store.host(port=port, timeout=LONG)  # it is free now, at once
    assert store.port == port


def test_a_store_listens_at_its_address_and_nowhere_else() -> None:
    store = Store.host("127.0.0.1", timeout=LONG)
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", store.port)) != 0
        assert other.connect_ex(("127.0.0.1", store.port)) == 0


def test_nobody_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(SupervisorLost, match="start it first"):
        open_store(Placement("127.0.0.1", port, hosts=False), timeout=0.3)


def test_ranks_of_torchrun_find_the_supervisor_by_its_own_store() -> None:
    """With an agent's store on the port, and without."""
    agent = Store.host(timeout=LONG)
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    told["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    found: list[Store] = []
    late = threading.Thread(
        target=lambda: found.append(open_store(placement({**told, "RANK": "1"}, None), timeout=LONG))
    )
    late.start()
    hosting = open_store(placement({**told, "RANK": "0"}, None), timeout=LONG)
    late.join(LONG)
    assert hosting.port == found[0].port != agent.port
    hosting.set("key", "value")
    assert found[0].get("key") == "value"

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = open_store(placement({**plain, "RANK": "0"}, None), timeout=LONG)
    other = open_store(placement({**plain, "RANK": "1"}, None), timeout=LONG)
    first.set("key", "value")
    assert (first.port, other.get("key")) == (port, "value")


def test_a_call_that_finds_nothing_ends_in_time() -> None:
    hosting = Store.host(timeout=LONG)
    store = hosting.clone(0.05)
    with pytest.raises(NoAnswer, match="'nothing' in the supervisor's store did not come within 50 ms"):
        store.get("nothing")
    assert store.pop("queue", wait=False) is None
    store.push("queue", "ä")
    store.push("queue", "b")
    assert [store.pop("queue", wait=True) for _ in range(2)] == ["ä", "b"]
    assert store.keys() == 0
