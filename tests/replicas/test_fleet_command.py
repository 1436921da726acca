"""`ballonet whatif --replicas`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from ballonet.__main__ import main
from ballonet.allocator.errors import ManageError
from ballonet.hooks.plan.machine import MachineSizes
from ballonet.hooks.replicas.recording import read_decisions
from ballonet.hooks.virtual_replicas.costs import of_parts, read_costs
from ballonet.hooks.virtual_replicas.fleet import Shape
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.protocol import Decision, Lost
from ballonet.offload.policy.step_costs import Parts, Step

from .virtual import replayed

KEYS = {
    *("policy", "replicas", "requests", "failed", "refused", "tokens", "seconds", "ttft_p50", "ttft_p99", "tbt_p50"),
    *("tbt_p99", "tokens_per_second", "kept", "goodput", "drops", "restores", "bytes_moved", "bubble", "time"),
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
    weights = MachineSizes.of(config()).total
    sizes = ["--budget", str(weights + 1500 * 1024), "--page-size", "4KiB"]
    return [str(tmp_path / "trace.csv"), "--model", str(tmp_path / "model"), *sizes]


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> list[dict[str, Any]]:
    main(["whatif", *command])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_policy(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--costs", str(tmp_path / "costs.json")]
    rows = printed(capsys, *files, *costs, "--replicas", "2")
    assert [row["policy"] for row in rows] == ["queue", "recompute", "swap", "migrate", "drop"]
    assert all({*row} == KEYS for row in rows)
    assert {(row["requests"], row["failed"], row["tokens"]) for row in rows} == {(200, 0, rows[0]["tokens"])}
    assert rows[0]["ttft_p99"] > 1.5 * rows[1]["ttft_p99"], "memory is short"
    again = printed(capsys, *files, *costs, "--replicas", "2", "--policy", "drop, queue")
    assert again == [rows[4], rows[0]]


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
    assert of_parts(parts).batch([(300, 7), (999, 1)]) == pytest.approx(parts.seconds(Step.of([(7, 300), (1, 999)])))
    (tmp_path / "steps.json").write_text(json.dumps({"fixed": 0.02, "row": 1e-3, "key": 1e-5, "pair": 1e-6}))
    assert read_costs(tmp_path / "steps.json") == (of_parts(parts), None)


def test_the_shape_of_a_model_is_read_from_its_configuration() -> None:
    shape = Shape.of(config())
    assert (len(shape.layers), shape.kv, shape.hidden) == (4, 4 * 2 * 2 * 16 * 4, 64 * 4)
    assert sum(shape.layers) + shape.rest == MachineSizes.of(config()).total


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
def test_file_that_has_no_cost_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ManageError, match="is no cost"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "wrong", [["--ask", "--ttft-slo", "1s"], ["--turns", "1s"], ["--shrink", "2"], ["--replicas", "0"]]
)
def test_arguments_that_replicas_do_not_take_are_refused(wrong: list[str], files: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["whatif", *files, "--replicas", "2", *wrong])
    assert stopped.value.code == 2


def test_a_policy_that_is_none_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", *files, "--replicas", "2", "--policy", "fast"]) != 0
    assert "no policy 'fast' of replicas" in capsys.readouterr().err


# Faults, and the log of decisions


def faulty(files: list[str], tmp_path: Path, *lines: str) -> list[str]:
    """A command with a file of faults."""
    (tmp_path / "faults.jsonl").write_text("\n".join(lines) + "\n")
    costs = ["--costs", str(tmp_path / "costs.json")]
    return [*files, *costs, "--replicas", "2", "--faults", str(tmp_path / "faults.jsonl")]


def test_faults_are_played_and_decisions_are_logged(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill, join = '{"at": 1.5, "fault": "killed", "member": 0}', '{"at": 2, "fault": "joined", "member": 2}'
    command = faulty(files, tmp_path, kill, "", join, '{"at": 0.5, "fault": "left", "request": 3}')
    (row,) = printed(capsys, *command, "--log", str(tmp_path / "log"))
    assert (row["policy"], row["requests"], row["failed"]) == ("drop", 200, 1)
    log = read_decisions(tmp_path / "log")
    lost = [entry.event for entry in log if isinstance(entry, Decision) and isinstance(entry.event, Lost)]
    assert lost == [Lost(pytest.approx(1.5, abs=0.1), 0)]
    assert all(one == other for one, other in replayed(log))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no fault"),
        ("3", "no fault"),
        ('{"at": 1}', "`fault`. Kinds: killed, hung, link, refused, file, damaged, left, joined, supervisor, shutdown"),
        ('{"at": 1, "fault": "bored"}', "Invalid value 'bored' - at `$.fault`. Kinds: killed, hung"),
        ('{"at": 1, "fault": ["killed"]}', "no fault"),
        ('{"at": 1, "fault": "killed"}', "missing"),
        ('{"fault": "supervisor"}', "missing"),
        ('{"at": 1, "fault": "killed", "member": 0, "how": 1}', "unknown field `how`"),
        ('{"at": -1, "fault": "killed", "member": 0}', ">= 0.0 - at `$.at`"),
        ('{"at": NaN, "fault": "killed", "member": 0}', "malformed"),
        ('{"at": "1", "fault": "killed", "member": 0}', "Expected `float`, got `str` - at `$.at`"),
        ('{"at": 1, "fault": "killed", "member": 0.5}', "Expected `int`, got `float` - at `$.member`"),
        ('{"at": 1, "fault": "killed", "member": true}', "Expected `int`, got `bool` - at `$.member`"),
        ('{"at": 1, "fault": "refused", "member": 0, "why": "RAIN"}', "Invalid enum value 'RAIN' - at `$.why`"),
    ],
)
def test_a_line_that_is_no_fault_is_refused(
    line: str, why: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = '{"at": 1, "fault": "shutdown"}'
    assert main(["whatif", *faulty(files, tmp_path, good, line)]) != 0
    said = capsys.readouterr().err
    assert "faults.jsonl:2: " in said
    assert why in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"at": 1, "fault": "killed", "member": 2}', "there are replicas 0, 1 then"),
        ('{"at": 1, "fault": "link", "member": 0, "other": 7}', "there are replicas 0, 1 then"),
        ('{"at": 1, "fault": "link", "member": 0, "other": 0}', "a link is between two replicas"),
        ('{"at": 1, "fault": "joined", "member": 1}', "that number is in use; the next free one is 2"),
        ('{"at": 1, "fault": "left", "request": 200}', "there are 200 requests, from 0 on"),
    ],
)
def test_a_fault_of_what_is_not_there_is_refused(
    line: str, why: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", *faulty(files, tmp_path, line)]) != 0
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["queue", "drop,queue", None])
def test_faults_and_a_log_are_of_the_policy_that_has_a_controller(policy: str | None, files: list[str]) -> None:
    wrong = [] if policy is None else ["--replicas", "2", "--policy", policy]
    for option in ("--faults", "--log"):
        with pytest.raises(SystemExit) as stopped:
            main(["whatif", *files, *wrong, option, "file"])
        assert stopped.value.code == 2
