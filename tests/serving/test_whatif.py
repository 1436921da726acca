"""The time machine: the same scheduler on pages of the stand-in, under a clock that a cost model moves."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from ballonet.__main__ import main
from ballonet.allocator import devices
from ballonet.allocator.errors import ManageError
from ballonet.cli import arguments
from ballonet.hooks import loading
from ballonet.hooks.batching.pages import SectorClient
from ballonet.hooks.device import managers
from ballonet.hooks.plan.machine import (
    Charges,
    Clock,
    CopyQueue,
    Decision,
    Machine,
    MachineSizes,
    Tenant,
    VirtualLoop,
    dealt,
)
from ballonet.hooks.plan.run import POLICIES, default, named, run
from ballonet.hooks.server.arrivals import RecordedArrival
from ballonet.hooks.streaming.model_residency import ModelResidency
from ballonet.offload.policy.plan import Costs, fewest
from ballonet.offload.policy.step_costs import Parts, Step, StepCosts
from ballonet.offload.policy.tuning import DEFAULT

from ..models import build
from .test_server import saved

MIB = 2**20
LINEAR, QUADRATIC = Parts(0.02, 1e-3, 0.0, 0.0), Parts(0.02, 1e-3, 1e-5, 1e-6)
ARRIVALS = [RecordedArrival(0.01 * n, 20 + 37 * n % 200, 16) for n in range(16)]
BATCHING = {"page_size": 32, "max_batch_tokens": 256}
ONE = default(1)
SHARED = ("fast", "swap", "no-buffer")


def config() -> Any:
    """Layers have 4 MiB of weights each, and a token has 16 KiB of KV."""
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
    )


def machine(mib: int, host: int = 64, scale: int = 1) -> Machine:
    return Machine(mib * MIB, host * MIB, 256 * 1024 * scale, 1000 * MIB, scale)


def simulated(
    policy: str,
    at: Machine,
    *arrivals: list[RecordedArrival],
    costs: Parts = LINEAR,
    log: list[Decision] | None = None,
    **more: Any,
) -> dict[str, Any]:
    tenants = [
        Tenant(name, config(), costs, arrival) for name, arrival in zip("abc", arrivals or (ARRIVALS,), strict=False)
    ]
    return run(tenants, at, policy, BATCHING, log=log, **more)


@pytest.mark.parametrize("policy", ONE)
def test_a_request_alone_takes_what_its_steps_cost(policy: str) -> None:
    figures = simulated(policy, machine(128), [RecordedArrival(0.0, 300, 4)], costs=QUADRATIC)
    prompts = QUADRATIC.seconds(Step(256, 256)) + QUADRATIC.seconds(Step(44, 300))
    tokens = [QUADRATIC.seconds(Step(1, 300 + n)) for n in (1, 2, 3)]
    assert figures["ttft_p50"] == pytest.approx(prompts)
    assert figures["seconds"] == pytest.approx(prompts + sum(tokens))
    assert figures["tbt_p99"] == pytest.approx(tokens[-1])
    assert (figures["requests"], figures["failed"], figures["tokens"], figures["steps"]) == (1, 0, 4, 5)
    assert figures["stalled"] == figures["moved"] == 0


def test_a_loop_is_wanted_until_its_last_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, close = list[float](), VirtualLoop.close

    def noted(loop: VirtualLoop) -> None:
        wanted.append(loop.processor.scheduler.wanted)
        close(loop)

    monkeypatch.setattr(VirtualLoop, "close", noted)
    figures = simulated("fast", machine(128), [RecordedArrival(0.0, 300, 3)])
    assert wanted == [pytest.approx(figures["seconds"])], "it is idle at once, and not after a pause"


def test_two_loops_in_turns_learn_the_parts_of_their_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = list[StepCosts]()
    make = StepCosts.__init__

    def noted(costs: StepCosts, *args: Any) -> None:
        learned.append(costs)
        make(costs, *args)

    monkeypatch.setattr(StepCosts, "__init__", noted)
    requests = [RecordedArrival(0.01 * n, 20 + 37 * n % 200, 24) for n in range(24)]
    simulated("fast", machine(256), *dealt(requests, 2))
    assert len(learned) == 2
    for costs in learned:
        parts, error = costs._fitted, costs.error
        assert parts is not None
        assert (parts.fixed, parts.row) == (pytest.approx(LINEAR.fixed, rel=0.05), pytest.approx(LINEAR.row, rel=0.05))
        assert error is not None
        assert error < 0.02


@pytest.mark.parametrize("policy", SHARED)
def test_two_runs_take_the_same_decisions(policy: str) -> None:
    """The same where weights lend, KV goes to the host and requests are preempted."""
    logs: list[list[Decision]] = [[], []]
    ones = [simulated(policy, machine(90), *dealt(ARRIVALS, 2), log=log) for log in logs]
    assert (ones[0]["requests"], ones[0]["failed"], ones[0]["tokens"]) == (16, 0, 16 * 16)
    assert logs[0] == logs[1]
    assert ones[0] == ones[1]
    assert len(logs[0]) == ones[0]["steps"]
    assert devices.current() is None


def test_the_log_says_what_ran_in_each_step() -> None:
    log: list[Decision] = []
    simulated("fast", machine(128), [RecordedArrival(0.0, 300, 3)], log=log)
    assert log == [
        (0.0, "a", (("a:0", 256),)),
        (pytest.approx(0.276), "a", (("a:0", 44),)),
        (pytest.approx(0.34), "a", (("a:0", 1),)),
        (pytest.approx(0.361), "a", (("a:0", 1),)),
    ]


def test_an_elastic_cache_takes_fewer_steps_in_little_memory() -> None:
    steps = {policy: simulated(policy, machine(48))["steps"] for policy in ONE}
    assert steps["full"] < 0.75 * steps["stock"]


def test_the_fastest_batches_are_faster_where_attention_costs_much() -> None:
    arrivals = [RecordedArrival(0.1 * n, 100, 40) for n in range(40)]
    full, fast = (simulated(policy, machine(256), arrivals, costs=QUADRATIC) for policy in ("full", "fast"))
    assert fast["tokens_per_second"] > 1.1 * full["tokens_per_second"]


def test_request_that_can_never_run_fails_alone() -> None:
    figures = simulated("fast", machine(48), [*ARRIVALS[:4], RecordedArrival(0.0, 100_000, 4)])
    assert (figures["requests"], figures["failed"]) == (5, 1)


def test_weights_that_do_not_fit_stream_and_have_steps_wait_as_the_schedule_says() -> None:
    """One request, in a budget that lacks pages for the layers: each step waits what the plan's passes take longer."""
    figures = simulated("fast", replace(machine(36), link=400.0 * MIB), [RecordedArrival(0.0, 16, 16)])
    page, compute = 256 * 1024 / (400 * MIB), LINEAR.seconds(Step(1, 17))
    pages = (17,) * 8  # of 4 MiB and a norm
    stalls = {
        Costs(pages, compute, page).expected(plan) - compute
        for wanted in range(sum(pages))
        if (plan := fewest(pages, wanted, Costs(pages, compute, page).ratio)) is not None
    }
    assert figures["failed"] == 0
    waited = figures["seconds"] - LINEAR.seconds(Step(16, 16)) - 15 * compute
    assert waited == pytest.approx(figures["stalled"] + figures["moved"], abs=1e-5)
    assert 0 < figures["stalled"] <= 16 * max(stalls)


def test_an_idle_model_lends_its_weights_to_one_that_is_asked() -> None:
    """All requests are for one of two models: it has more of them at once than where the other's weights stay."""
    lent, fixed = (simulated(policy, machine(80), ARRIVALS, []) for policy in ("fast", "weights-fixed"))
    assert lent["kv_bytes"] > fixed["kv_bytes"]
    assert lent["steps"] < fixed["steps"]
    assert [model["requests"] for model in lent["models"]] == [16, 0]


@pytest.mark.parametrize(("mib", "least", "most"), [(40, 30, 36), (64, 5, 25), (128, 0, 1)])
def test_swapping_copies_what_is_missing_at_a_change(mib: int, least: float, most: float) -> None:
    """Two models of 35 MiB: what does not fit beside the first one is copied when the second one computes."""
    first, second = [RecordedArrival(0.0, 32, 4)], [RecordedArrival(0.0, 32, 4)]
    figures = simulated("swap", machine(mib), first, second)
    alone = simulated("stock", machine(mib), first)
    assert figures["swaps"] == 1
    assert least <= figures["moved"] * 1000 <= most
    assert figures["seconds"] == pytest.approx(2 * alone["seconds"] + figures["moved"], abs=1e-5)


def test_a_long_answer_does_not_hold_up_the_model_that_is_not_there() -> None:
    """One of 400 tokens takes 8 s: once the other has waited 3 s it is suspended, and goes on later."""
    log: list[Decision] = []
    figures = simulated("swap", machine(64), [RecordedArrival(0.0, 32, 400)], [RecordedArrival(0.5, 32, 4)], log=log)
    assert (figures["failed"], figures["tokens"]) == (0, 404)
    assert 3 <= figures["models"][1]["ttft_p99"] < 3.5
    assert figures["swaps"] == 2
    assert [name for _, name, _ in log][-1] == "a"


def test_models_that_do_not_fit_take_turns_and_none_waits_long_for_an_answer_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of 35 MiB on 60, over a slow link. One's answer of
    400 tokens takes 8 s: once the other has waited for 3 s it is suspended, and goes on later."""
    monkeypatch.setenv("BALLONET_TURN", "3s")
    log: list[Decision] = []
    slow = replace(machine(60), link=100 * MIB)
    requests = [RecordedArrival(0.0, 32, 400)], [RecordedArrival(0.5, 32, 40)]
    figures, shared = simulated("fast", slow, *requests, log=log), simulated("no-turns", slow, *requests)
    assert (figures["failed"], figures["tokens"]) == (0, 440)
    assert figures["models"][1]["ttft_p99"] < 4
    names = [name for _, name, _ in log]
    assert sum(one != other for one, other in itertools.pairwise(names)) == 2, "a turn of each, and the rest"
    assert names[-1] == "a"
    assert figures["seconds"] < 0.8 * shared["seconds"]
    assert figures["stalled"] + figures["moved"] < shared["stalled"] / 4


def test_another_model_computes_while_a_step_waits_for_its_copies() -> None:
    log: list[Decision] = []
    slow = replace(machine(60), link=400 * MIB)
    figures = simulated("no-turns", slow, [RecordedArrival(0.0, 32, 40)], [RecordedArrival(0.0, 32, 40)], log=log)
    together = [(one[1], other[1]) for one, other in itertools.pairwise(log) if one[0] == other[0]]
    assert {("a", "b"), ("b", "a")}.intersection(together), "both were begun at one time"
    compute = 2 * (LINEAR.seconds(Step(32, 32)) + sum(LINEAR.seconds(Step(1, 33 + n)) for n in range(39)))
    assert compute < figures["seconds"] < compute + 0.9 * (figures["stalled"] + figures["moved"])


def test_copies_of_several_steps_go_one_after_the_other() -> None:
    clock = Clock()
    link = CopyQueue(clock)
    assert link.take_copies() == 0.0, "there are none"
    for moment, seconds, landed in ((1.0, 2.0, 3.0), (2.0, 0.5, 3.5), (5.0, 1.0, 6.0)):
        clock.now, link.moved = moment, seconds
        assert link.take_copies() == landed
    assert link.take_copies() == clock.now, "those were taken once"


def test_recomputing_moves_nothing_and_unlimited_waits_for_nothing() -> None:
    """Both have ballonet's scheduler: the one computes requests again that the other has memory for."""
    apart = dealt(ARRIVALS, 2)
    again, floor = (simulated(policy, machine(80), *apart) for policy in ("recompute", "unlimited"))
    assert again["failed"] == floor["failed"] == 0
    assert again["stalled"] == again["moved"] == floor["stalled"] == floor["moved"] == 0
    assert floor["ttft_p99"] < again["ttft_p99"]


def test_kv_on_the_host_that_hides_makes_room_for_more_requests() -> None:
    """Pie: the same parts as split, and as much again of the cache as crosses the link in a step, for nothing."""
    split, pie = (simulated(policy, machine(80), *dealt(ARRIVALS, 2)) for policy in ("split", "pie"))
    slow = simulated("pie", replace(machine(80), link=1.0 * MIB), *dealt(ARRIVALS, 2))
    assert pie["steps"] < split["steps"] == slow["steps"]


def test_kv_read_on_the_host_makes_no_step_longer_than_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has room for all, and a page of it takes 6 ms in each step, a step with a whole prompt 0.28 s."""
    steps, waits = list[tuple[int, int, float]](), Charges._waits

    def noted(charges: Charges, client: SectorClient, residency: ModelResidency, seconds: float) -> float:
        waited = waits(charges, client, residency, seconds)
        steps.append((len(client._read), client.read_displaced, seconds + waited))
        return waited

    monkeypatch.setattr(Charges, "_waits", noted)
    requests = [RecordedArrival(0.02 * n, 200, 48) for n in range(16)]
    figures = simulated("weights-fixed", replace(machine(48), link=50 * MIB), requests)
    assert figures["failed"] == 0
    assert any(away for _, away, _ in steps), "some KV is read on the host"
    longest = LINEAR.seconds(Step(BATCHING["max_batch_tokens"], 0))
    known = next(at for at, (_, away, _) in enumerate(steps) if away) + DEFAULT.serving.refit
    alone = max(read for read, _, _ in steps[:1])
    assert [step for step in steps[known:] if step[1] and step[0] > alone and step[2] > 1.1 * longest] == []


def test_requests_are_dealt_by_seed() -> None:
    one, same, other = (dealt(ARRIVALS, 2, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted((*one[0], *one[1]), key=lambda it: it.at) == ARRIVALS
    turns = dealt(ARRIVALS, 2, turn=0.04, seed=3)
    assert {int(arrival.at / 0.04) for arrival in turns[0]}.isdisjoint(int(arrival.at / 0.04) for arrival in turns[1])


def test_split_gives_each_model_an_even_part() -> None:
    """Two models that are asked in turns, each in its part, take as many steps each as one alone in as much."""
    apart = [replace(arrival, at=arrival.at + 1000) for arrival in ARRIVALS]
    figures, alone = simulated("split", machine(128), ARRIVALS, apart), simulated("stock", machine(64))
    assert figures["steps"] == 2 * alone["steps"]
    with pytest.raises(ManageError, match="has no room for a cache beside weights"):
        simulated("split", machine(64), ARRIVALS, apart)


def test_a_machine_that_is_larger_is_simulated_in_fewer_bytes() -> None:
    """Every page is so many times smaller here, and there are as many: the same decisions, at about the same times."""
    logs: list[list[Decision]] = [[], []]
    whole, small = (
        simulated("fast", machine(mib, scale=scale, host=host), log=log)
        for (mib, host, scale), log in zip(((64, 64, 1), (64, 64, 4)), logs, strict=True)
    )
    assert small["kv_bytes"] == pytest.approx(whole["kv_bytes"], rel=0.2)
    assert small["seconds"] == pytest.approx(whole["seconds"], rel=0.15)
    with pytest.raises(ManageError, match="heads of 64 elements cannot be 3 times smaller"):
        run([Tenant("a", config(), LINEAR, ARRIVALS)], replace(machine(64), page_size=3 * 2**18, scale=3), "fast", {})
    with pytest.raises(ManageError, match="multiple of 4096"):
        replace(machine(64), page_size=2**16, scale=32)


def test_switches_change_what_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst for both models, which share the device: each of these parts of ballonet has a say in it."""
    monkeypatch.setenv("BALLONET_TURN", "0")
    burst = dealt([RecordedArrival(0.02 * n, 200, 24) for n in range(18)], 2)
    logs: dict[str, list[Decision]] = {}
    for policy in ("fast", "no-return", "weights-fixed", "activations-apart", "no-buffer"):
        logs[policy] = []
        figures = simulated(policy, replace(machine(78, host=256), link=200.0 * MIB), *burst, log=logs[policy])
        assert policy == "activations-apart" or figures["failed"] == 0
    assert all(logs[policy] != logs["fast"] for policy in logs if policy != "fast")


@pytest.mark.filterwarnings("ignore:.*is not kept")
def test_requests_that_ask_for_too_much_fail() -> None:
    figures = simulated("fast", machine(64), slos=(None, 1e-3), ask=True)
    assert figures["failed"] > 0
    assert simulated("fast", machine(64), slos=(None, 1e-3))["failed"] == 0


def test_bad_input_is_told() -> None:
    with pytest.raises(ManageError, match="no policy 'best'"):
        simulated("best", machine(64))
    with pytest.raises(ManageError, match="give split or swap"):
        simulated("stock", machine(64), ARRIVALS, ARRIVALS)
    with pytest.raises(ManageError, match="weights of a have"):
        simulated("fast", machine(16))
    with pytest.raises(ManageError, match="no requests"):
        simulated("fast", machine(64), [])
    assert managers.composed_with().clock() != 0.0
    assert all(named(name, 1) for name in POLICIES)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the model where nobody has, and says what each policy would do; wrong input is told."""
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    trace, costs, model = tmp_path / "trace.csv", tmp_path / "costs.json", saved(tmp_path / "model", 2)
    rows = [f"{20 + n},{4 + n % 5}" for n in range(12)]
    trace.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]))
    command = ["whatif", str(trace), "--model", model, "--budget", "16MiB", "--page-size", "64KiB", "--rate", "50"]
    command += ["--host-budget", "8MiB", "--block-size", "16", "--batch-tokens", "128", "--costs", str(costs)]
    assert main(command) == 0
    said = capsys.readouterr()
    results = [json.loads(line) for line in said.out.splitlines()]
    assert [row["policy"] for row in results] == list(ONE)
    assert {row["requests"] for row in results} == {12}
    assert "half of those measured are within" in said.err
    assert asdict(Parts(**json.loads(costs.read_text()))).keys() >= {"fixed", "row", "key", "pair"}
    assert main([*command, "--policy", "fast"]) == 0
    assert "measuring" not in capsys.readouterr().err
    assert main([*command, "--model", model, "--turns", "100ms"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["policy"] for row in results] == list(default(2))
    assert {tenant["requests"] for tenant in results[0]["models"]} == {6} or len(results[0]["models"]) == 2
    assert {row["time"] for row in results} == {"simulated"}
    assert {row["pages"] for row in results} == {"real"}
    assert main([*command, "--policy", "best"]) != 0
    assert "there are stock, split" in capsys.readouterr().err
    for wrong in (["--turns", "1s"], ["--ask"], ["--costs", str(costs)]):
        with pytest.raises(SystemExit):
            main([*command, *wrong])
    costs.write_text('{"fixed": 1}')
    assert main(command) != 0
    assert "is no cost model" in capsys.readouterr().err


def test_a_configuration_alone_is_measured_with_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is one request of somebody else's service, which has more tokens than the model, or the simulated
    budget, has room for: what is measured is as long as the model can be."""
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    trace, costs, model = tmp_path / "trace.csv", tmp_path / "costs.json", Path(saved(tmp_path / "model", 2))
    trace.write_text("num_prefill_tokens,num_decode_tokens\n60000,4")
    for file in model.glob("*.safetensors"):
        file.unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    command = ["whatif", str(trace), "--model", str(model), "--budget", "4MiB", "--page-size", "64KiB"]
    monkeypatch.setattr(arguments, "time", SimpleNamespace(monotonic=partial(next, itertools.count(0.0, 10.0))))
    main([*command, "--costs", str(costs), "--policy", "fast"])
    said = capsys.readouterr().err
    assert "on this machine, with random weights, as it has none" in said
    assert re.search(r"measuring \S+: [0-9]+%, about [0-9]+ s left", said)
    assert asdict(Parts(**json.loads(costs.read_text()))).keys() >= {"fixed", "row", "key", "pair"}
    monkeypatch.setattr(loading, "bytes_of_weights", lambda config: ((2**60,), 0))
    costs.unlink()
    assert main([*command, "--costs", str(costs)]) != 0
    assert "to draw them takes" in capsys.readouterr().err


def test_a_policy_that_does_not_fit_has_a_row_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models: half of the budget is too little for the one that is larger, all of it is enough for either."""
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    trace, costs = tmp_path / "trace.csv", tmp_path / "costs.json"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n20,4\n20,4")
    costs.write_text(json.dumps(asdict(LINEAR)))
    models = [saved(tmp_path / str(layers), layers) for layers in (2, 40)]
    command = ["whatif", str(trace), "--model", models[0], "--model", models[1], "--page-size", "64KiB", "--json"]
    command += ["--costs", str(costs), "--block-size", "16", "--batch-tokens", "64", "--budget"]
    weights = MachineSizes.of(build("llama", num_hidden_layers=40).config).total
    budget = str(-(-int(1.9 * weights) // 65536) * 65536)
    assert main([*command, budget, "--policy", "split,swap"]) == 0
    split, swap = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert split.keys() == {"policy", "error"}
    assert "no room for a cache beside weights" in split["error"]
    assert (swap["policy"], swap["failed"]) == ("swap", 0)
    assert main([*command, budget, "--policy", "split"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["policy"] == "split"
    assert "no request is answered by split" in said.err


def test_weights_are_those_of_the_model() -> None:
    model = build("llama")
    sizes = MachineSizes.of(model.config)
    assert sizes.total == sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.layers == tuple(sum(parameter.nbytes for parameter in it.parameters()) for it in model.model.layers)
