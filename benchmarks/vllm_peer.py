"""vLLM as a peer of many requests at once: the same shape, with random weights of its own, and the same budget.

It runs where it is installed, on a GPU. Its answers are not those of the other peers, whose weights it does not have.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def is_here() -> bool:
    return find_spec("vllm") is not None


def answer(config: Any, asked: Sequence[Sequence[int]], tokens: int, budget: int) -> dict[str, Any]:
    """Answers the prompts `asked`, `tokens` each, twice, the second time measured, with all of vLLM's memory within
    `budget` bytes. Returns tokens per second, and P99 of the seconds to the first and for each later token."""
    import torch
    from vllm import LLM, SamplingParams

    total = torch.cuda.mem_get_info()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        model = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            gpu_memory_utilization=budget / total,
            max_model_len=config.max_position_embeddings,
            disable_log_stats=False,  # or it notes no times
        )
        prompts: list[Any] = [{"prompt_token_ids": list(each)} for each in asked]
        for count in (2, tokens):
            wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            found = model.generate(prompts, wanted, use_tqdm=False)
            took = time.perf_counter() - began
    times = [each.metrics for each in found]
    return {
        "speed": sum(len(each.outputs[0].token_ids) for each in found) / took,
        "first": [each.first_token_latency for each in times],
        "later": [(each.last_token_ts - each.first_token_ts) / max(1, tokens - 1) for each in times],
    }
