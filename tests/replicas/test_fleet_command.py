"""`python -m ballonet whatif --replicas`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from ballonet.__main__ import main
from ballonet.allocator.errors import ManageError
from ballonet.hooks.whatif.machine import Sizes
from ballonet.hooks.whatif.replicas.costs import of_parts, read_costs
from ballonet.hooks.whatif.replicas.fleet import Shape
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.step_costs import Parts, Step

KEYS = {
    *("policy", "replicas", "requests", "failed", "refused", "tokens", "seconds", "ttft_p50", "ttft_p99", "tbt_p50"),
    *("tbt_p99", "tokens_per_second", "goodput", "drops", "restores", "bytes_moved", "bubble", "time"),
}
GIVEN = {"alpha": 1e-9, "beta": 2e-5, "gamma": 2e-2, "decode": {"alpha": 0, "beta": 2e-5, "gamma": 2e-2}}


def config() -> LlamaConfig:
    """Four layers; a token has 4 layers x 2 x 2 heads x 16 elements x 4 bytes of KV."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A model, a trace and costs, as arguments."""
    config().save_pretrained(tmp_path / "model")
    lines = [f"2023-11-16 18:17:{n // 50:02d}.{n % 50 * 20000:06d},{20 + n % 40},{30 + n % 90}" for n in range(200)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    (tmp_path / "costs.json").write_text(json.dumps(GIVEN))
    weights = Sizes.of(config()).total
    sizes = ["--budget", str(weights + 1500 * 1024), "--page-size", "4KiB"]
    return [str(tmp_path / "trace.csv"), "--model", str(tmp_path / "model"), *sizes]


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> list[dict[str, Any]]:
    main(["whatif", *command])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_policy(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--costs", str(tmp_path / "costs.json")]
    found = printed(capsys, *files, *costs, "--replicas", "2")
    assert [each["policy"] for each in found] == ["queue", "recompute", "swap", "migrate", "drop"]
    assert all({*each} == KEYS for each in found)
    assert {(each["requests"], each["failed"], each["tokens"]) for each in found} == {(200, 0, found[0]["tokens"])}
    assert found[0]["ttft_p99"] > 1.5 * found[1]["ttft_p99"], "memory is short"
    again = printed(capsys, *files, *costs, "--replicas", "2", "--policy", "drop, queue")
    assert again == [found[4], found[0]]


def test_a_cost_is_fitted_to_batches_and_its_error_is_said(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = ChunkCost(1e-8, 2e-5, 2e-2)
    batches = [
        {"chunks": [[100 * n, 7 + n % 5 * 40]], "seconds": truth.seconds(100 * n, 7 + n % 5 * 40)} for n in range(40)
    ]
    (tmp_path / "batches.json").write_text(json.dumps(batches))
    main(["whatif", *files, "--costs", str(tmp_path / "batches.json"), "--replicas", "2", "--policy", "queue"])
    assert "differ by 0.0% on average" in capsys.readouterr().err
    cost, made = read_costs(tmp_path / "batches.json")
    assert made is not None
    assert cost.seconds(500, 50) == pytest.approx(truth.seconds(500, 50))


def test_costs_of_steps_are_costs_of_chunks(tmp_path: Path) -> None:
    parts = Parts(0.02, 1e-3, 1e-5, 1e-6)
    for before, new in [(0, 1), (0, 50), (300, 7), (999, 1)]:
        assert of_parts(parts).seconds(before, new) == pytest.approx(parts.seconds(Step(new, before + new)))
    (tmp_path / "steps.json").write_text(json.dumps({"fixed": 0.02, "row": 1e-3, "key": 1e-5, "pair": 1e-6}))
    assert read_costs(tmp_path / "steps.json") == (of_parts(parts), None)


def test_the_shape_of_a_model_is_read_from_its_configuration() -> None:
    shape = Shape.of(config())
    assert (len(shape.layers), shape.kv, shape.hidden) == (4, 4 * 2 * 2 * 16 * 4, 64 * 4)
    assert sum(shape.layers) + shape.rest == Sizes.of(config()).total


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "3",
        '{"alpha": -1, "beta": 1, "gamma": 1}',
        '{"alpha": 0, "beta": 0, "gamma": 1}',
        '{"alpha": 1}',
        "[",
    ],
)
def test_what_is_no_cost_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ManageError, match="is no cost"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "wrong", [["--ask", "--ttft-slo", "1s"], ["--turns", "1s"], ["--shrink", "2"], ["--replicas", "0"]]
)
def test_what_replicas_do_not_take_is_refused(wrong: list[str], files: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["whatif", *files, "--replicas", "2", *wrong])
    assert stopped.value.code == 2


def test_a_policy_that_is_none_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", *files, "--replicas", "2", "--policy", "fast"]) != 0
    assert "no policy 'fast' of replicas" in capsys.readouterr().err
