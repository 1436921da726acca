"""Planned pages are those of a run: as the kernel counts them, over random models, budgets, contexts and batches."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.hooks.plan.planner import Planner

from . import models
from .pool import bytes_that_exist, installing
from .tuned import tuning

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
        )

    @property
    def context(self) -> int:
        return self.prompt + self.tokens - 1

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
    device, found = runtime.require(), list[Seen]()

    def look(_: Any, __: Any, given: dict[str, Any], ___: Any) -> None:
        if given["past_key_values"].get_seq_length() == setting.context:
            seen = device.snapshot()
            streamed = len(ballonet.manage(model).report().streamed)
            found.append(
                Seen(
                    seen["pages"],
                    bytes_that_exist() // setting.page,
                    streamed,
                    seen["heap"]["requested_peak"],
                )
            )

    with ballonet.manage(model):
        ids = torch.randint(2, 60, (setting.batch, setting.prompt), generator=torch.Generator().manual_seed(1))
        handle = model.register_forward_hook(look, with_kwargs=True)
        try:
            counts = {"max_new_tokens": setting.tokens, "min_new_tokens": setting.tokens}
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **counts)
        finally:
            handle.remove()
    return found[-1]


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for what the runs are on."""
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")


@pytest.mark.parametrize("seed", [2, 3, 8, 17, 19])
def test_planned_pages_are_those_of_a_run(seed: int) -> None:
    setting = Setting.drawn(seed)
    model = setting.build()
    with tuning(weights={"large": 2**11}), tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)

        def planner(budget: int) -> Planner:
            return Planner(folder, setting.context, setting.batch, setting.prompt, budget, setting.page, None)

        wide = planner(2**30)
        answer = wide.ask(wide.asked)
        pages = round(answer.least + setting.part * (answer.all - answer.least))
        while True:  # one at which nothing has to leave while it runs
            planned = planner(pages * setting.page)
            facts = planned.facts()
            assert facts["fits"]
            if facts["exact"]:
                break
            pages += max(1, (answer.all - answer.least) // 8)
        peak = max(each.peak for each in planned.sizings[0].seen(setting.batch, setting.prompt, setting.context))
        with installing(pages * setting.page, setting.page) as now:
            now()
            seen = run(model, setting)
    assert {name: seen.pages[name] for name in ("weights", "kv")} == {
        name: facts["pages"][name] for name in ("weights", "kv")
    }
    assert seen.exist == sum(seen.pages.values())
    assert seen.streamed == facts["layers_streamed"]
    assert peak <= seen.peak <= 1.1 * peak
    assert seen.pages["activations"] <= facts["pages"]["activations"] + SLACK


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
            assert run(model, setting).streamed == setting.layers
