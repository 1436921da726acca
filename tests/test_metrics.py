"""Figures for Prometheus of any process: the registry, the port, what goes wrong, and the dashboard that reads them."""

from __future__ import annotations

import builtins
import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import devices
from ballonet.allocator.errors import ConfigError, ExtraMissing, PortInUse
from ballonet.hooks.replicas.replica_server import FleetMetrics
from ballonet.hooks.replicas.supervisor import FleetState
from ballonet.hooks.watch import registry
from ballonet.hooks.watch.endpoint import listen

from .dashboard import DASHBOARD, asked, expressions, sample_names
from .models import build, prompts
from .pool import take_out

PAGE = 65536


@pytest.fixture
def installed() -> Iterator[None]:
    ballonet.install("32MiB", page_size=PAGE, host_budget="8MiB", device="cpu")
    yield
    take_out()


def page(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    """Values by name and labels, such as 'ballonet_device_bytes{owner=kv}'. Each is there once."""
    values = dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in values
            values[name] = sample.value
    return values


@pytest.mark.usefixtures("installed")
def test_any_process_has_figures_at_a_port() -> None:
    model = build("llama")
    endpoint = ballonet.metrics.serve(0)
    try:
        with ballonet.manage(model, prefix_cache=True):
            for _ in range(2):
                model.generate(**prompts(batch=1, longest=9), max_new_tokens=6, min_new_tokens=6, do_sample=False)
            devices.of().events.decided("kv", "reclaim", 3, measured=0.5)
            devices.require().reap(wait=True)  # so that both looks find the same
            now, stats = samples(page(endpoint.url)), ballonet.stats()
    finally:
        endpoint.close()
    owners = {name: now[f"ballonet_device_bytes{{owner={name}}}"] for name in stats.pages}
    assert owners == {name: count * PAGE for name, count in stats.pages.items()}
    assert sum(owners.values()) == now["ballonet_created_bytes"] <= now["ballonet_budget_bytes"] == 2**25
    assert now["ballonet_kv_bytes{tier=device}"] == owners["kv"] > 0
    assert now["ballonet_decision_bytes_total{source=kv,verb=reclaim}"] == 3 * PAGE
    assert now["ballonet_decision_seconds_total{source=kv,verb=reclaim}"] == 0.5
    name = type(model).__name__
    assert now[f"ballonet_layers{{model={name}}}"] == model.config.num_hidden_layers
    # the second prompt may lack one token only
    assert now[f"ballonet_forward_seconds_count{{model={name},phase=prefill}}"] >= 1
    tokens = {place: now[f"ballonet_prompt_tokens_total{{found={place},model={name}}}"] for place in ("device", "no")}
    assert tokens["device"] > 0
    assert sum(tokens.values()) == 2 * prompts(batch=1, longest=9)["input_ids"].shape[1]
    with pytest.raises(urllib.error.URLError):
        page(endpoint.url)
    again = ballonet.metrics.serve(endpoint.port)
    again.close()
    again.close()


@pytest.mark.usefixtures("installed")
def test_buckets_count_all_that_is_shorter() -> None:
    model = build("llama")
    with ballonet.manage(model):
        model.generate(**prompts(batch=1, longest=9), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        families = {family.name: family for family in text_string_to_metric_families(registry.text().decode())}
    family = families["ballonet_forward_seconds"]
    decode = [sample for sample in family.samples if sample.labels["phase"] == "decode"]
    buckets = [sample.value for sample in decode if sample.name.endswith("_bucket")]
    assert [sample.labels["le"] for sample in decode if sample.name.endswith("_bucket")][-1] == "+Inf"
    assert buckets == sorted(buckets)
    (count,) = [sample.value for sample in decode if sample.name.endswith("_count")]
    (seconds,) = [sample.value for sample in decode if sample.name.endswith("_sum")]
    assert buckets[-1] == count >= 4
    assert seconds > 0


def test_before_install_there_is_a_page_with_nothing_on_it() -> None:
    assert registry.text() == b""


@pytest.mark.usefixtures("installed")
def test_figures_of_a_supervisor_are_on_the_page_until_it_ends() -> None:
    moved, seconds = (7, 9), {"busy": 3.0, "open": 4.0}
    state = FleetState(
        5, {0: (0, 4), 1: (4, 8)}, ((0, 1),), 2, 1, 0, 0, moved, 6, 4, 0, 0, {}, {0: 4, 1: 4}, **seconds, errors={}
    )
    added, endpoint = FleetMetrics(lambda: state), ballonet.metrics.serve(0)
    try:
        now = samples(page(endpoint.url))
        assert now["ballonet_budget_bytes"] == 2**25, "the process's own"
        assert now["ballonet_replica_layers{edge=begin,replica=1}"] == 4
        assert now["ballonet_replica_requests{state=computed}"] == 2
        assert now["ballonet_replica_moved_bytes_total{what=layers}"] == 9
        assert now["ballonet_pipeline_bubble"] == 0.25
        added.close()
        added.close()
        assert not [name for name in samples(page(endpoint.url)) if "replica" in name or "pipeline" in name]
    finally:
        endpoint.close()


# -- what goes wrong


def test_a_port_in_use_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}: end it .*or port 0 for any that is free"):
            ballonet.metrics.serve(port)
        with pytest.raises(PortInUse):
            listen("localhost", port)
        assert main(["serve", "no-model", "--port", str(port)]) == 2, "before it loads anything"
        assert f":{port}: end it" in capsys.readouterr().err
    for listener in listen("127.0.0.1", port):
        listener.close()


@pytest.mark.parametrize("port", [-1, 65536, True, "9400", 1.5])
def test_impossible_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match="which is no port: write a whole number from 0 to 65535"):
        ballonet.metrics.serve(port)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match="Choose an address of this machine"):
        ballonet.metrics.serve(0, "192.0.2.1")
    with pytest.raises(ConfigError, match=r"nothing can listen at nowhere\.invalid:9400: .*Name or service|resolution"):
        listen("nowhere.invalid", 9400)


def test_without_prometheus_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "ballonet.hooks.watch.registry")
    stock = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraMissing, match=r"metrics need prometheus-client.*pip install 'ballonet\[metrics\]'"):
        ballonet.metrics.serve(0)


# -- the dashboard


@pytest.mark.usefixtures("installed")
def test_the_dashboard_is_one_and_its_panels_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(at["x"] + x, at["y"] + y) for at in places for x in range(at["w"]) for y in range(at["h"])]
    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
    known = {name for name, _ in sample_names(registry.text().decode())}
    server = {"ballonet_requests", "ballonet_batches_total", "ballonet_host_buffer_bytes"}
    assert set().union(*map(asked, expressions())) <= known | server
