"""A model gives pages of its layers to another's KV cache: how long it takes to its first token when it runs again.

Three models share a budget that holds their weights. "running" is given a prompt whose cache finds no pages, so an idle
model gives some (Oneiros §5): by the rule the one that ran last, which in a round of models is the one whose turn is
farthest away, or, by its lower priority, the one whose turn is next. Then the next one answers. Its bound is the longer
of its first token with all layers resident and of the bytes that came over the link. Later, when the cache is gone,
weights take the pages back, and a token takes as long as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from common import MIB, Figure, Options, describe_few, report
from peer import Functions, begin, peers, seconds
from streamed import environment, page_size

if TYPE_CHECKING:
    from ballonet import Managed

POLICIES = {"the one that ran last": 0, "the one that is next": -1}  # the priority of the next one
LAYERS = 16
PROMPTS = {"cuda": (8, 2048), "cpu": (4, 512), "tiny": (1, 512)}  # sequences and tokens of the one that is too long
QUESTION = 64  # tokens of the others
ROUNDS = 3
PATIENCE = 30.0  # s until weights are back
IDLE = 1.2  # s after which a model counts as idle
LIMIT = 1.1


def main() -> None:
    chosen = begin("reactivate", __doc__, functions)
    rows = []
    policies = list(POLICIES)[-1:] if chosen.tiny else list(POLICIES)
    for policy in policies:
        names = (policy, "link")
        with peers(__file__, chosen, names, dict.fromkeys(names, environment(chosen))) as found:
            answer, link = found[policy].ask("reactivate"), found["link"].ask("link")
        bound = max(answer["resident"], answer["bytes"] / link * 1e3)
        over, later = Figure.of([answer["ms"] / bound]), Figure.of([answer["later"] / answer["token"]])
        rows.append(
            {
                "who gives first": policy,
                "layers of the next, the last": f"{answer['next']}, {answer['last']}",
                "first token of the next: resident, ms": Figure.of([answer["resident"]]),
                "ms": Figure.of([answer["ms"]]),
                "MiB over the link": round(answer["bytes"] / MIB, 1),
                "bound, ms": round(bound, 1),
                "ms / bound": over.at_most(LIMIT) if chosen.cuda else over,
                "token later / resident": later.at_most(1.03) if chosen.cuda else later,
                "to the host twice": Figure.of([float(answer["back"])]).at_most(0),
            }
        )
    title = f"a model that gave pages of its layers runs again: three models of {describe_few(chosen, LAYERS)}"
    report(chosen, "reactivate", title, rows)


def functions(name: str, chosen: Options) -> Functions:
    return {"reactivate": lambda: reactivate(POLICIES[name], chosen)}


def reactivate(priority: int, chosen: Options) -> dict[str, Any]:
    """`priority`: of the model that is next."""
    import torch
    from generating import answer
    from llama import build, few

    import ballonet
    from ballonet.allocator import devices

    ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=page_size(chosen))
    device = devices.require()
    models = [build(few(chosen, LAYERS), chosen.device) for _ in range(3)]
    managed = [ballonet.manage(each, priority=n) for each, n in zip(models, (priority, 0, 0), strict=True)]
    following, last, running = models
    batch, length = PROMPTS[chosen.kind]
    question = torch.ones(1, QUESTION, dtype=torch.long, device=chosen.device)
    too_long = torch.ones(batch, length, dtype=torch.long, device=chosen.device)

    def say(model: Any, prompt: torch.Tensor, tokens: int = 1) -> float:
        return seconds(chosen.device, lambda: answer(model, prompt, tokens)) * 1e3

    for model in models:
        say(model, question, 2)
    resident = median(say(following, question) for _ in range(ROUNDS))
    token = per_token(say, last, question)
    device.reset_peaks()
    say(running, too_long, 2)
    budget, less = device.snapshot()["physical_peak"], -(-layer_bytes(managed[0]) // 2)
    while not any(each.report().streamed for each in managed):
        budget -= less
        ballonet.set_budget(budget)
        for model in models:
            say(model, question, 2)  # what may be given is known from here on
        time.sleep(IDLE)
        say(running, too_long, 2)
    given = [len(each.report().streamed) for each in managed[:2]]
    before = ballonet.stats().copied
    ms = say(following, question)
    moved = ballonet.stats().copied
    ends = time.monotonic() + (0 if chosen.tiny else PATIENCE)
    while any(each.report().streamed for each in managed) and time.monotonic() < ends:
        for model in models:
            say(model, question, 2)
    later = per_token(say, last, question)
    ends_with = ballonet.stats()
    return {
        "resident": resident,
        "token": token,
        "next": given[0],
        "last": given[1],
        "ms": ms,
        "bytes": moved.weights_h2d - before.weights_h2d,
        "later": later,
        "back": max(0, ends_with.copied.weights_d2h - ends_with.host_pages * ends_with.page_size),
    }


def per_token(say: Callable[..., float], model: Any, prompt: Any) -> float:
    """ms of a decode step."""
    return median((say(model, prompt, 9) - say(model, prompt, 1)) / 8 for _ in range(ROUNDS))


def layer_bytes(managed: Managed) -> int:
    """About."""
    import ballonet

    return managed.report().pages * ballonet.stats().page_size // (LAYERS + 1)


if __name__ == "__main__":
    main()
