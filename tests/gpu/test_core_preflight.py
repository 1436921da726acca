"""The preflight on a device: all that needs no stand-in answers, and what the driver refuses is gone round."""

from __future__ import annotations

import os

import pytest

from ballonet.allocator import runtime
from ballonet.allocator.config import Config
from ballonet.allocator.preflight import run

pytestmark = pytest.mark.gpu


def test_the_driver_s_probes_answer() -> None:
    names = ("device", "granularity", "handles", "host_pages", "aliases", "several_handles", "graphs", "torch_graphs")
    found = run.preflight(runtime.choose(Config(device="cuda")), names)
    assert {name: each["status"] for name, each in found["probes"].items()} == dict.fromkeys(names, "answered")
    assert found["settings"] == {}, found["reasons"]
    assert found["probes"]["graphs"]["facts"]["another_page"] is True
    assert found["probes"]["torch_graphs"]["facts"]["on_host"] is True


@pytest.mark.parametrize("fault", ["hostnuma", "sticky:3"])
def test_what_a_simulated_driver_refuses_is_gone_round(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "SIMGPU_HOME" not in os.environ:
        pytest.skip("only the simulated device has faults that can be planted")
    target = runtime.choose(Config(device="cuda"))
    monkeypatch.setenv("SIMGPU_FAULT", fault)
    assert run.preflight(target, ("host_pages",))["settings"] == {"host_pages": False}
