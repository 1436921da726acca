"""What one decoded token costs a layer's KV cache: stock concatenates, the elastic layer appends in place.

One layer, batch 1, 8 heads of 128, bfloat16; each peer in a process with its own allocator.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common import Figure, Options, report
from peer import Functions, begin, in_turns, peers, synchronize

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicLayer

LENGTHS = (1024, 4096, 8192, 16384, 32768)
HEADS, DIM = 8, 128
STEPS = 16
LIMIT = 25  # µs


def main() -> None:
    chosen = begin("kv-growth", __doc__, functions)
    rows = []
    with peers(__file__, chosen, ("stock", "ballonet")) as found:
        for length in (16, 64) if chosen.tiny else LENGTHS:
            taken = in_turns(found, chosen.repetitions, "steps", length=length)
            theirs, ours = taken["stock"], taken["ballonet"]
            row = {"tokens held": length, "stock DynamicLayer": theirs, "ballonet": ours.at_most(LIMIT)}
            rows.append({**row, "times faster": Figure.ratio(theirs, ours)})
    report(chosen, "kv-growth", "one more token in a KV cache: µs per layer", rows)


def functions(name: str, chosen: Options) -> Functions:
    from transformers.cache_utils import DynamicLayer

    import ballonet
    from ballonet.hooks.kv.layer import ElasticLayer

    kind: type[DynamicLayer] = DynamicLayer
    if name == "ballonet":
        ballonet.install("2GiB")
        kind = ElasticLayer
    return {"steps": lambda length: time_steps(kind(), length, chosen.device)}


def time_steps(layer: DynamicLayer, length: int, device: str) -> float:
    """µs per one-token update of a layer that holds `length` tokens."""
    import torch

    prompt = torch.zeros(1, HEADS, length, DIM, dtype=torch.bfloat16, device=device)
    token = torch.zeros(1, HEADS, 1, DIM, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        layer.update(prompt, prompt)
        layer.update(token, token)
        synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(STEPS):
            layer.update(token, token)
        synchronize(device)
        return (time.perf_counter_ns() - begin) / STEPS / 1e3


if __name__ == "__main__":
    main()
