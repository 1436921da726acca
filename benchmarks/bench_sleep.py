"""Models that sleep, and weights that are replaced.

sleep: rounds of `generate()`, sleep and wake. What is left on the device while the model sleeps is counted from outside
the process: by the driver on a GPU, on the stand-in by the kernel, which counts the memory of its file. The first token
after waking is compared with the slower of its prefill and of all weights over the link, measured in the same run.

sync: RL's weight sync: all parameters are replaced before each step of a few tokens, as load_state_dict(assign=True)
and servers of rollouts do. Stock does the same; what is beside its time are copies of the weights to where they lie in
the pool, whose bandwidth is measured alone.
"""

from __future__ import annotations

import resource
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
SYNCS = {"cuda": 200, "cpu": 200, "tiny": 6}
PROMPT = {"cuda": 4096, "cpu": 512, "tiny": 32}  # tokens
NEW = {"cuda": 16, "cpu": 4, "tiny": 2}  # tokens of an answer
ROLLOUT = {"cuda": 256, "cpu": 16, "tiny": 2}  # tokens of a step between two syncs: RL writes whole answers
SETTLED = 4  # rounds before memory is compared


def sleeping(chosen: Options) -> None:
    rows = []
    for level in (1, 2):
        with peers(chosen, (OURS,), {OURS: environment(chosen)}) as started:
            rows.append(started[OURS].ask("sleep", level=level))
    said = [
        {name: Figure.of(values) if isinstance(values, list) else values for name, values in row.items()}
        for row in rows
    ]
    for row in said:
        row["left on the device, MiB"] = row["left on the device, MiB"].at_most(0)
        row["more memory, MiB"] = row["more memory, MiB"].at_most(4)
        row["answers that differ"] = row["answers that differ"].at_most(0)
        row["first token / max(prefill, link)"] = row["first token / max(prefill, link)"].at_most(1.1)
    report(chosen, titled(chosen, f"{ROUNDS[chosen.kind]} rounds of sleep, {shape_of(chosen)}"), said)


def syncing(chosen: Options) -> None:
    with peers(chosen, (STOCK, OURS)) as started:
        took = in_turns(started, chosen.repetitions, "sync")
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


def shape_of(chosen: Options) -> str:
    return describe_few(chosen, LAYERS[chosen.kind])


def functions(name: str, chosen: Options) -> Functions:
    if chosen.benchmark == "sleep":
        return {"sleep": partial(sleep, chosen)}
    return Sync(name, chosen).functions()


def sleep(chosen: Options, level: int) -> dict[str, Any]:
    """What rounds at this level found; lists are figures."""
    kind = chosen.kind
    ballonet.install(unlimited(chosen), host_budget=unlimited(chosen), page_size=layer_page_size(chosen))
    model = build(few(chosen, LAYERS[kind]), chosen.device)
    weights = sum(weight.nbytes for weight in model.parameters())
    managed = ballonet.manage(model)
    prompt = torch.randint(2, 190, (1, PROMPT[kind]), device=chosen.device)

    def first() -> None:
        with torch.no_grad():
            model(prompt, use_cache=False, logits_to_keep=1)

    expected = answer(chosen, model, prompt)
    empty = emptied(chosen, managed)
    prefill = min(seconds(chosen.device, first) for _ in range(3))
    link = weights / bandwidth(chosen)()
    left, firsts, differing, memory = 0.0, [], 0, 0
    for number in range(ROUNDS[kind]):
        managed.sleep(level)
        left = max(left, (on_device(chosen) - empty) / MIB)
        firsts.append(seconds(chosen.device, first))
        differing += not torch.equal(answer(chosen, model, prompt), expected)
        if number == SETTLED:
            memory = resident()
    return {
        "level": level,
        "left on the device, MiB": [left],
        "more memory, MiB": [(resident() - memory) / MIB],
        "answers that differ": [float(differing)],
        "first token after waking, s": firsts,
        "prefill, s": [prefill],
        "weights over the link, s": [link],
        "first token / max(prefill, link)": [value / max(prefill, link) for value in firsts],
    }


def emptied(chosen: Options, managed: Any) -> int:
    """Bytes of the device in use while the model sleeps, of which none are its own, as `report` says."""
    managed.sleep()
    assert managed.report().pages == 0
    empty = on_device(chosen)
    managed.wake()
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
        """Seconds of a step, of many."""
        rounds = SYNCS[self._chosen.kind]

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


BENCHMARKS = {"sleep": Benchmark(sleeping, functions), "sync": Benchmark(syncing, functions)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
