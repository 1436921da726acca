"""Time of a prompt's first forward, stock and managed: what the hooks and the elastic cache add to a prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common import Figure, Options, describe, report
from peer import Functions, begin, in_turns, peers, seconds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = {"cuda": (1024, 8192), "cpu": (256, 1024), "tiny": (24,)}
LIMIT = 1.02  # of stock's time


def main() -> None:
    chosen = begin("prefill", __doc__, functions)
    rows = []
    with peers(__file__, chosen, ("stock", "ballonet")) as found:
        for length in LENGTHS[chosen.kind]:
            taken = in_turns(found, chosen.repetitions, "prefill", tokens=length)
            ratio = Figure.ratio(taken["ballonet"], taken["stock"]).at_most(LIMIT)
            rows.append({"tokens": length, **taken, "ballonet / stock": ratio})
    report(chosen, "prefill", f"prefill: ms per prompt, {describe(chosen)}", rows)


def functions(name: str, chosen: Options) -> Functions:
    from llama import prepare

    model = prepare(name, chosen)
    return {"prefill": lambda tokens: prefill(name, model, tokens, chosen.device)}


def prefill(peer: str, model: PreTrainedModel, tokens: int, device: str) -> float:
    """ms"""
    import torch
    from transformers import DynamicCache

    import ballonet
    from ballonet.hooks.compat import cache_name

    config = model.config
    prompt = torch.randint(0, config.vocab_size, (1, tokens), device=device)
    cache = ballonet.KVCache(config=config) if peer == "ballonet" else DynamicCache(config=config)
    given = {cache_name(model): cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        return seconds(device, lambda: model(prompt, **given)) * 1e3


if __name__ == "__main__":
    main()
