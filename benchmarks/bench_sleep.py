"""Models that sleep, and weights that are replaced.

sleep: rounds of `generate()`, sleep and wake. What is left on the device while the model sleeps is counted from outside
the process: by the driver on a GPU, on the stand-in by the kernel, which counts the memory of its file.

wake: the first token after waking, compared with the slower of its prefill and of all weights over the link, measured
in the same run. On a CPU one core is the device, and the other has the host's work and the link, as beside a GPU.

sync: RL's weight sync: all parameters are replaced before each step of a few tokens, as load_state_dict(assign=True)
and servers of rollouts do. Stock does the same; what is beside its time are copies of the weights to where they lie in
the pool, whose bandwidth is measured alone.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import MIB, Benchmark, Figure, Functions, Options, in_turns, main, peers, report
from models import (
    OURS,
    STOCK,
    bandwidth,
    build,
    describe,
    describe_few,
    environment,
    few,
    layer_page_size,
    seconds,
    shape,
    synchronize,
    titled,
    unlimited,
)

import ballonet

LAYERS = {"cuda": 32, "cpu": 8, "tiny": 2}
ROUNDS = {"cuda": 500, "cpu": 500, "tiny": 6}  # of sleep and wake, at each level
WAKES = {"cuda": 50, "cpu": 10, "tiny": 3}  # of a whole model, at each level
SYNCS = {"cuda": 200, "cpu": 200, "tiny": 6}
TURNS = {"cuda": 5, "cpu": 10, "tiny": 2}  # in which the peers do them
PROMPT = {"cuda": 4096, "cpu": 512, "tiny": 32}  # tokens
NEW = {"cuda": 16, "cpu": 4, "tiny": 2}  # tokens of an answer
ROLLOUT = {"cuda": 256, "cpu": 16, "tiny": 2}  # tokens of a step between two syncs: RL writes whole answers
SETTLED = 4  # rounds before memory is compared
PART = 20  # rounds that a peer is asked for at once


def sleeping(chosen: Options) -> None:
    limits = {"left on the device, MiB": 0.0, "more memory, MiB": 4.0, "answers that differ": 0.0}
    title = f"{ROUNDS[chosen.kind]} rounds of sleep, {describe_few(chosen, LAYERS[chosen.kind])}"
    by_level(chosen, title, limits, -(-ROUNDS[chosen.kind] // PART))


def waking(chosen: Options) -> None:
    title = f"The first token after sleep, of {PROMPT[chosen.kind]}, {describe(chosen)}"
    by_level(chosen, title, {"first token / max(prefill, link)": 1.1, "answers that differ": 0.0}, 1)


def by_level(chosen: Options, title: str, limits: Mapping[str, float], parts: int) -> None:
    """Reports what rounds at each level found by the last of so many parts."""
    rows = []
    for level in (1, 2):
        with peers(chosen, (OURS,), {OURS: environment(chosen)}) as started:
            row: dict[str, Any] = {"level": level}
            answers = [started[OURS].ask("rounds", level=level) for _ in range(parts)]
            for name, values in answers[-1].items():
                figure = Figure.of(values)
                row[name] = figure.at_most(limits[name]) if name in limits else figure
            rows.append(row)
    report(chosen, titled(chosen, title), rows)


def syncing(chosen: Options) -> None:
    with peers(chosen, (STOCK, OURS)) as started:
        took = in_turns(started, TURNS[chosen.kind], "sync")
        copies = Figure.of([started[OURS].ask("copy")])
        outside = Figure.of([float(started[OURS].ask("outside"))]).at_most(0)
    rows = []
    for name, figure in took.items():
        more = Figure.of([(figure.median - (copies.median if name == OURS else 0)) / took[STOCK].median])
        rows.append(
            {
                "peer": name,
                "seconds of a step": figure,
                "without the copies / stock's": more.at_most(1.1) if name == OURS else more,
                "tensors outside of the pool": outside if name == OURS else Figure.of([0.0]),
            }
        )
    report(chosen, f"{SYNCS[chosen.kind]} weight syncs, {describe(chosen)}", rows)


def functions(name: str, chosen: Options) -> Functions:
    if chosen.benchmark == "sync":
        return Sync(name, chosen).functions()
    return {"rounds": Rounds(chosen).run if chosen.benchmark == "sleep" else partial(wake, chosen)}


class Rounds:
    """Rounds of sleep of a few layers of the model, in the process of the peer, and what was found in all of them."""

    def __init__(self, chosen: Options) -> None:
        self._chosen = chosen
        self._sleeper = Sleeper(chosen, few(chosen, LAYERS[chosen.kind]))
        self._expected = self._sleeper.answer()
        self._empty = self._sleeper.emptied()
        self._left = self._memory = self._differing = self._done = 0

    def run(self, level: int) -> dict[str, list[float]]:
        """What was found by the end of one more part of the rounds."""
        for _ in range(min(PART, ROUNDS[self._chosen.kind] - self._done)):
            self._sleeper.managed.sleep(level)
            self._left = max(self._left, on_device(self._chosen) - self._empty)
            self._differing += not torch.equal(self._sleeper.answer(), self._expected)
            self._done += 1
            if self._done == SETTLED:
                self._memory = resident()
        return {
            "left on the device, MiB": [self._left / MIB],
            "more memory, MiB": [(resident() - self._memory) / MIB],
            "answers that differ": [float(self._differing)],
        }


def wake(chosen: Options, level: int) -> dict[str, list[float]]:
    """Seconds of the first token of the whole model after sleep at this level, and of what limits it."""
    if not chosen.cuda:
        torch.set_num_threads(1)
    sleeper = Sleeper(chosen, shape(chosen))
    expected = sleeper.answer()
    link = sleeper.weights / bandwidth(chosen)()
    firsts, prefills, differing = [], [], 0
    for _ in range(WAKES[chosen.kind]):
        sleeper.managed.sleep(level)
        firsts.append(seconds(chosen.device, sleeper.first))
        differing += not torch.equal(sleeper.answer(), expected)
        prefills.append(seconds(chosen.device, sleeper.first))
    return {
        "first token after waking, s": firsts,
        "prefill, s": prefills,
        "weights over the link, s": [link],
        "first token / max(prefill, link)": [
            first / max(prefill, link) for first, prefill in zip(firsts, prefills, strict=True)
        ],
        "answers that differ": [float(differing)],
    }


class Sleeper:
    """A managed model that sleeps, and its prompt. `weights`: bytes."""

    def __init__(self, chosen: Options, config: Any) -> None:
        self._chosen = chosen
        ballonet.install(unlimited(chosen), host_budget=unlimited(chosen), page_size=layer_page_size(chosen))
        self._model = build(config, chosen.device)
        self.weights = sum(weight.nbytes for weight in self._model.parameters())
        self.managed = ballonet.manage(self._model)
        self._prompt = torch.randint(2, 190, (1, PROMPT[chosen.kind]), device=chosen.device)

    def first(self) -> None:
        """Computes the first token."""
        with torch.no_grad():
            self._model(self._prompt, use_cache=False, logits_to_keep=1)

    def answer(self) -> torch.Tensor:
        return answer(self._chosen, self._model, self._prompt)

    def emptied(self) -> int:
        """Bytes of the device in use while the model sleeps, of which none are its own, as `report` says."""
        self.managed.sleep()
        assert self.managed.report().pages == 0
        empty = on_device(self._chosen)
        self.managed.wake()
        return empty


def on_device(chosen: Options) -> int:
    """Bytes of the device in use, as others than ballonet count them."""
    synchronize(chosen.device)
    if chosen.cuda:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return sum(link.stat().st_blocks * 512 for link in Path("/proc/self/fd").iterdir() if is_device(link))


def is_device(link: Any) -> bool:
    try:
        return "memfd:ballonet-device" in str(link.readlink())
    except OSError:  # it was that of the listing
        return False


def resident() -> int:
    """Bytes of the host that the process has."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


def answer(chosen: Options, model: Any, prompt: torch.Tensor, tokens: dict[str, int] = NEW) -> torch.Tensor:
    """The tokens of an answer of so many, by kind."""
    return model.generate(prompt, max_new_tokens=tokens[chosen.kind], do_sample=False)


class Sync:
    """A model whose parameters are replaced before each step, in the process of one peer."""

    def __init__(self, name: str, chosen: Options) -> None:
        self._chosen = chosen
        if name == OURS:
            ballonet.install(unlimited(chosen), page_size=layer_page_size(chosen))
        self._model = build(shape(chosen), chosen.device)
        self._managed = ballonet.manage(self._model) if name == OURS else None
        self._source = [weight.detach().clone() for weight in self._model.parameters()]
        self._prompt = torch.randint(2, 190, (1, PROMPT["tiny"]), device=chosen.device)

    def functions(self) -> Functions:
        return {"sync": self.sync, "copy": self.copy, "outside": self.outside}

    def sync(self) -> float:
        """Seconds of a step, of those of one turn."""
        rounds = SYNCS[self._chosen.kind] // TURNS[self._chosen.kind]

        def steps() -> None:
            for _ in range(rounds):
                for weight, new in zip(self._model.parameters(), self._source, strict=True):
                    weight.data = new.clone()
                answer(self._chosen, self._model, self._prompt, ROLLOUT)

        return seconds(self._chosen.device, steps) / rounds

    def copy(self) -> float:
        """Seconds to copy all weights from one place of the device to another, once."""
        targets = [weight.clone() for weight in self._source]

        def copies() -> None:
            for target, weight in zip(targets, self._source, strict=True):
                target.copy_(weight)

        return min(seconds(self._chosen.device, copies) for _ in range(5))

    def outside(self) -> int:
        """Tensors that are not in the pool by now."""
        answer(self._chosen, self._model, self._prompt)
        return 0 if self._managed is None else len(self._managed.report().unmanaged_tensors)


BENCHMARKS = {
    "sleep": Benchmark(sleeping, functions),
    "wake": Benchmark(waking, functions),
    "sync": Benchmark(syncing, functions),
}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
