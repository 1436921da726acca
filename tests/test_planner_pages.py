"""Planned pages are those of a run: as the kernel counts them, over random models, budgets, contexts and batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.config import Config
from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.device.key import key_for
from ballonet.hooks.plan.forward import shape_of
from ballonet.hooks.plan.planner import Planner
from ballonet.offload.record import record
from ballonet.offload.record.record import Point, Record

from . import models
from .pool import bytes_that_exist, cache_of_its_own, installing
from .tuned import Clock, tuning

# The settings in which a plan says "about": by a few pages that kernels may allocate inside of themselves more leaves,
# or less (offload/policy/planner/memory.py, Note [What cannot be foreseen]).
ABOUT = frozenset({4, 11, 12})
NAMES = ("llama", "qwen3", "gpt2", "gemma2", "mistral", "olmo2", "mixtral", "phi")
LAYERS = {"gpt2": "n_layer"}
SLACK = 4  # pages: small blocks of the heap, which few operators share out


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and how it is run. `part`: of the way from the smallest budget to one that holds everything."""

    name: str
    layers: int
    page: int
    batch: int
    prompt: int
    tokens: int
    part: float
    record: str = ""  # of what was measured of it: nothing, that all copies hide, that none does

    @classmethod
    def drawn(cls, seed: int) -> Setting:
        draw = random.Random(seed)
        return cls(
            draw.choice(NAMES),
            draw.randint(2, 8),
            draw.choice([4096, 8192, 16384]),
            draw.randint(1, 4),
            draw.randint(8, 60),
            draw.randint(8, 60),
            draw.uniform(0, 1.1),
            ("", "hides", "waits")[seed % 3],
        )

    @property
    def context(self) -> int:
        return self.prompt + self.tokens - 1

    def changed(self, what: str, to: int, budget: int) -> tuple[Setting, int]:
        """The setting and the budget in bytes, with one of them changed."""
        if what == "budget":
            return self, to
        if what == "batch":
            return replace(self, batch=to), budget
        prompt = min(self.prompt, to)
        return replace(self, prompt=prompt, tokens=to - prompt + 1), budget

    def build(self) -> Any:
        changes: dict[str, Any] = {LAYERS.get(self.name, "num_hidden_layers"): self.layers}
        if self.name == "gemma2":
            changes["layer_types"] = (["sliding_attention", "full_attention"] * 4)[: self.layers]
        with install.stock():  # as a model from files: its weights are not in the pool before
            return models.build(self.name, **changes)


@dataclass(frozen=True, slots=True)
class Seen:
    """At the last token: pages by owner, all pages that exist, the layers that stream, and the most bytes that the heap
    had at once."""

    pages: dict[str, int]
    exist: int
    streamed: int
    peak: int


def run(model: Any, setting: Setting) -> Seen:
    """Generates, and looks after the last forward."""
    device, moments = devices.require(), list[Seen]()

    def look(_: Any, __: Any, given: dict[str, Any], ___: Any) -> None:
        if given_cache(given).get_seq_length() == setting.context:
            streamed = len(ballonet.manage(model).report().streamed)
            while True:
                seen, exist = device.snapshot(), bytes_that_exist() // setting.page
                if device.snapshot()["pages"] == seen["pages"]:  # nothing was mapped ahead between the two
                    break
            moments.append(Seen(seen["pages"], exist, streamed, seen["heap"]["requested_peak"]))

    with ballonet.manage(model):
        ids = torch.randint(2, 60, (setting.batch, setting.prompt), generator=torch.Generator().manual_seed(1))
        handle = model.register_forward_hook(look, with_kwargs=True)
        try:
            counts = {"max_new_tokens": setting.tokens, "min_new_tokens": setting.tokens}
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **counts)
        finally:
            handle.remove()
    return moments[-1]


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plans are for what the runs are on, and go by the records that they have."""
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    cache_of_its_own(tmp_path / "cache", monkeypatch)


def remember(setting: Setting, folder: str, cache: Path) -> None:
    """Keeps the record of the setting: an iteration takes minutes, or the link does for a page."""
    if setting.record:
        key = key_for(shape_of(folder).model, "standin", 0, Config())
        seconds, bandwidth = (1e3, 1e12) if setting.record == "hides" else (1e-6, 1.0)
        points = (Point("prefill", 8, 256), Point("decode", 8, 256))
        record.save(Record(key, bandwidth, dict.fromkeys(points, seconds)), record.path_of(cache, key))


@pytest.mark.parametrize("seed", range(14))
def test_planned_pages_are_those_of_a_run(seed: int, tmp_path: Path) -> None:
    """No page of weights or KV more or less, whatever streams and leaves; or the plan says that it may be."""
    setting = Setting.drawn(seed)
    model, folder = setting.build(), str(tmp_path / "model")
    with tuning(weights={"large": 2**11}, clock=Clock()):
        model.config.save_pretrained(folder)
        remember(setting, folder, tmp_path / "cache")

        def planner(budget: int) -> Planner:
            return Planner(folder, setting.context, setting.batch, setting.prompt, budget, setting.page, None)

        wide = planner(2**30)
        answer = wide.ask(wide.asked)
        pages = round(answer.least + setting.part * (answer.all - answer.least))
        planned = planner(pages * setting.page)
        facts = planned.facts()
        assert facts["fits"]
        peak = max(figures.peak for figures in planned.sizings[0].seen(setting.batch, setting.prompt, setting.context))
        with installing(pages * setting.page, setting.page) as now:
            now()
            seen = run(model, setting)
    assert seen.exist == sum(seen.pages.values())
    assert peak <= seen.peak <= 1.1 * peak
    if facts["exact"]:
        assert seen.pages["activations"] <= facts["pages"]["activations"] + SLACK
        assert {name: seen.pages[name] for name in ("weights", "kv")} == {
            name: facts["pages"][name] for name in ("weights", "kv")
        }
        assert seen.streamed == facts["layers_streamed"]
    assert facts["exact"] is (seed not in ABOUT)


@pytest.mark.parametrize("seed", range(40, 43))
def test_each_change_that_is_named_really_fits(seed: int, tmp_path: Path) -> None:
    """Nothing is refused, nor put on pages of the host."""
    drawn = Setting.drawn(seed)
    setting = replace(drawn, batch=drawn.batch + 2, record="")
    model, folder = setting.build(), str(tmp_path)
    with tuning(weights={"large": 2**11}, clock=Clock()):
        model.config.save_pretrained(folder)
        plan = {"context": setting.context, "prompt": setting.prompt, "batch": setting.batch, "page_size": setting.page}
        least = ballonet.plan(folder, budget=2**30, **plan)["least_budget"]
        budget = least - setting.page * (1 + seed % 8)
        facts = ballonet.plan(folder, budget=budget, **plan)
        assert not facts["fits"]
        changes = [fact for fact in facts["changes"] if fact["what"] in ("budget", "context", "batch")]
        assert changes
        for change in changes:
            changed, given = setting.changed(change["what"], change["to"], budget)
            with installing(given, setting.page) as now:
                now()
                run(model, changed)
                devices.of().events.hear()
                assert not {"spill", "refuse"} & devices.of().events.counts().keys(), change["text"]


def test_without_the_least_budget_nothing_runs_and_with_it_it_does(tmp_path: Path) -> None:
    """The least budget is one of a run, to the page."""
    setting = Setting("llama", 5, 4096, 1, 8, 4, 0.0)
    model = setting.build()
    model.config.save_pretrained(tmp_path)
    with tuning(weights={"large": 2**11}):
        plan = {"context": setting.context, "prompt": setting.prompt, "page_size": setting.page}
        least = ballonet.plan(tmp_path, budget=2**30, **plan)["least_budget"]
        assert ballonet.plan(tmp_path, budget=least, **plan)["fits"]
        short = ballonet.plan(tmp_path, budget=least - setting.page, **plan)
        assert (short["fits"], short["limit"], short["least_budget"]) == (False, "memory", least)
        with installing(least - setting.page, setting.page) as now:
            now()
            with pytest.raises(ballonet.BudgetError) as refused:
                ballonet.manage(model)
            assert refused.value.smallest == least
            refused = None  # type: ignore[assignment]
        with installing(least, setting.page) as now:
            now()
            with ballonet.manage(model) as managed:
                assert len(managed.report().streamed) == setting.layers
            run(model, setting)
