"""The time machine: the same scheduler on pages of the stand-in, under a clock that a cost model moves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from ballonet.__main__ import main
from ballonet.allocator import runtime
from ballonet.hooks.server.arrivals import Arrival
from ballonet.hooks.server.whatif import POLICIES, Machine, Policy, run, weights_of
from ballonet.offload.policy.step_costs import Parts, Step

from ..models import build
from .test_server import saved

MIB = 2**20
LINEAR, QUADRATIC = Parts(0.02, 1e-3, 0.0, 0.0), Parts(0.02, 1e-3, 1e-5, 1e-6)
ARRIVALS = [Arrival(0.01 * n, 20 + 37 * n % 200, 24) for n in range(24)]
BATCHING = {"page_size": 32, "max_batch_tokens": 256}


def config() -> Any:
    return LlamaConfig(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4)


def machine(mib: int, costs: Parts = LINEAR) -> Machine:
    return Machine(mib * MIB, 64 * MIB, 256 * 1024, 8 * MIB, costs)


def simulated(policy: Policy, at: Machine, arrivals: list[Arrival] = ARRIVALS) -> dict[str, Any]:
    return run(arrivals, config(), at, policy, BATCHING)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_alone_takes_what_its_steps_cost(policy: Policy) -> None:
    found = simulated(policy, machine(64, QUADRATIC), [Arrival(0.0, 300, 4)])
    prompts = QUADRATIC.seconds(Step(256, 256)) + QUADRATIC.seconds(Step(44, 300))
    tokens = [QUADRATIC.seconds(Step(1, 300 + n)) for n in (1, 2, 3)]
    assert found["ttft_p50"] == pytest.approx(prompts)
    assert found["seconds"] == pytest.approx(prompts + sum(tokens))
    assert found["tbt_p99"] == pytest.approx(tokens[-1])
    assert (found["requests"], found["failed"], found["tokens"], found["steps"]) == (1, 0, 4, 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_in_the_same_time_again(policy: Policy) -> None:
    found = simulated(policy, machine(48))
    assert (found["requests"], found["failed"], found["tokens"]) == (24, 0, 24 * 24)
    assert simulated(policy, machine(48)) == found
    assert runtime.current() is None
    assert found["kv_bytes"] <= (48 - 8 + 64) * MIB


def test_an_elastic_cache_takes_fewer_steps_in_little_memory() -> None:
    steps = {policy: simulated(policy, machine(24))["steps"] for policy in POLICIES}
    assert steps["full"] < 0.75 * steps["stock"]


def test_the_fastest_batches_are_faster_where_attention_costs_much() -> None:
    arrivals = [Arrival(0.1 * n, 100, 40) for n in range(80)]
    full, fast = (simulated(policy, machine(256, QUADRATIC), arrivals) for policy in ("full", "fast"))
    assert fast["tokens_per_second"] > 1.1 * full["tokens_per_second"]


def test_what_can_never_run_fails_alone() -> None:
    found = simulated("fast", machine(16), [*ARRIVALS[:4], Arrival(0.0, 100_000, 4)])
    assert (found["requests"], found["failed"]) == (5, 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the model where nobody has, and says what each policy would do; wrong input is told."""
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    trace, costs, model = tmp_path / "trace.csv", tmp_path / "costs.json", saved(tmp_path / "model", 2)
    rows = [f"{20 + n},{4 + n % 5}" for n in range(24)]
    trace.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]))
    command = ["whatif", str(trace), "--model", model, "--budget", "16MiB", "--page-size", "64KiB", "--rate", "50"]
    command += ["--host-budget", "8MiB", "--block-size", "16", "--batch-tokens", "128", "--costs", str(costs)]
    assert main(command) == 0
    said = capsys.readouterr()
    found = [json.loads(line) for line in said.out.splitlines()]
    assert [each["policy"] for each in found] == list(POLICIES)
    assert {each["requests"] for each in found} == {24}
    assert "half of those measured are within" in said.err
    assert asdict(Parts(**json.loads(costs.read_text()))).keys() == {"fixed", "row", "key", "pair"}
    assert main([*command, "--policy", "fast"]) == 0
    assert "measuring" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--policy", "swap"])
    assert "there are stock, full, fast" in capsys.readouterr().err
    costs.write_text('{"fixed": 1}')
    assert main(command) != 0
    assert "is no cost model" in capsys.readouterr().err


def test_weights_are_those_of_the_model() -> None:
    model = build("llama")
    assert weights_of(model.config) == sum(each.nbytes for each in model.parameters())
