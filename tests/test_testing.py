"""`ballonet.testing`: chaos, faults and links, which the signatures of ballonet do not have."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.allocator.config import Config
from ballonet.allocator.errors import AlreadyManaged, ConfigError, OptionError

from .models import build, generate, prompts
from .pool import installing


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(2**25, 65536) as put:
        yield put()


def test_variables_of_the_environment() -> None:
    variables = testing.environment(
        chaos=7,
        fault="cuMemMap:7,cuMemCreate=700:1",
        link="2GB/s",
        link_latency="2ms",
        peer_link="1GB/s",
        replica_faults="/tmp/faults",
    )
    assert Config.from_env(variables) == Config(
        chaos=7,
        faults=(("cuMemMap", 7), ("cuMemCreate=700", 1)),
        link_bandwidth=2 * 10**9,
        link_latency=2e-3,
        peer_bandwidth=10**9,
        replica_faults=Path("/tmp/faults"),
    )
    assert testing.environment() == {}
    assert set(inspect.signature(testing.environment).parameters) == {"chaos", "fault", "replica_faults", *LINKS}


LINKS = ("link", "link_latency", "peer_link")


@pytest.mark.parametrize("wrong", [{"chaos": -1}, {"fault": "cuMemMap"}, *({name: "fast"} for name in LINKS)])
def test_wrong_variable_of_chaos_is_told(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"BALLONET_{name.upper()}"):
        testing.environment(**wrong)


def test_chaos_of_one_model(device: Device) -> None:
    model, other = build("llama"), build("llama")
    expected = generate(model, "greedy", prompts(2, 9), 6)
    with testing.manage(model, chaos=5, priority=1) as managed, ballonet.manage(other) as plain:
        assert generate(model, "greedy", prompts(2, 9), 6).agrees(expected)
        chaos = testing.chaos_of(managed)
        assert chaos is not None
        assert chaos.seed == 5
        assert chaos.moved["weights"] > 0
        assert testing.chaos_of(plain) is None
        assert testing.manage(model, chaos=5) is ballonet.manage(model) is managed
        assert testing.chaos_of(managed) is chaos, "with its counts"
        with pytest.raises(AlreadyManaged, match="seed 5"):
            testing.manage(model, chaos=6)
        for wrong in (-2, True, "five"):
            with pytest.raises(OptionError, match="seed"):
                testing.manage(other, chaos=wrong)
    assert devices.require() is device


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, ballonet.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
