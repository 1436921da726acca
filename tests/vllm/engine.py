"""An engine of vLLM in a process of its own, for the tests beside it: `python engine.py MODEL ANSWERS OPTIONS`.

OPTIONS, JSON: those of the connector, or null for stock; `changes`: (wave, budget in bytes) before which wave of
requests the budget changes; `fail`: so many calls that back blocks fail, from the tenth on; `led`: each line of
stdin is the number of a wave, and is answered by a line once that is done, as is the start; `patient`: other processes
that share the budget are waited for, however long they take; `squeeze`: bytes, the budget that another thread asks for
in the middle of a forward. ANSWERS, a file: the tokens of each request, the pages of KV after each wave, and whether
that budget was refused.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

WAVES, REQUESTS, TOKENS = 3, 12, 60
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
}


def prompts() -> list[list[list[int]]]:
    """The tokens of each request of each wave."""
    draw = random.Random(1)
    return [
        [[draw.randrange(2, 199) for _ in range(draw.randint(5, 200))] for _ in range(REQUESTS)] for _ in range(WAVES)
    ]


def transfer(options: dict[str, Any]) -> dict[str, Any]:
    """What tells vLLM of the connector with these options."""
    return {
        "kv_connector": "BallonetConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "ballonet.hooks.vllm",
        "kv_connector_extra_config": options,
    }


def main(model: str, answers: str, text: str) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    from vllm import LLM, SamplingParams

    options = json.loads(text)
    ours = {name: (options or {}).pop(name, None) for name in ("changes", "fail", "led", "patient", "squeeze")}
    if ours["patient"]:
        wait_for_others()
    more = {} if options is None else {"kv_transfer_config": transfer(options)}
    engine = LLM(model, skip_tokenizer_init=True, enforce_eager=True, **SIZES, **more)
    if ours["fail"]:
        fail(ours["fail"])
    changes, said, pages, refused = dict(ours["changes"] or ()), [], [], list[bool]()
    if ours["squeeze"]:
        squeeze(ours["squeeze"], refused)
    if ours["led"]:
        print("done", flush=True)
    waves = prompts()
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for wave in map(int, sys.stdin) if ours["led"] else range(WAVES):
        if wave in changes:
            import ballonet

            ballonet.set_budget(changes[wave])
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in waves[wave]], sampling, use_tqdm=False)
        said.append([list(output.outputs[0].token_ids) for output in outputs])
        pages.append(held() if options is not None else {})
        if ours["led"]:
            print("done", flush=True)
    Path(answers).write_text(json.dumps({"said": said, "pages": pages, "refused": refused}))


def squeeze(budget: int, refused: list[bool]) -> None:
    """Has another thread ask for that budget before a layer of a decode step, and notes whether it was refused."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    import ballonet

    stock, number = LlamaDecoderLayer.forward, count()

    def ask() -> None:
        try:
            ballonet.set_budget(budget, timeout=0.5)
        except ballonet.BudgetInUse:
            refused.append(True)
        else:
            refused.append(False)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(number) == 100:
            asking = threading.Thread(target=ask)
            asking.start()
            asking.join()
        return stock(self, *args, **kwargs)

    LlamaDecoderLayer.forward = forward


def wait_for_others() -> None:
    """Nothing depends on how busy the machine is."""
    from dataclasses import replace

    from ballonet.hooks.device import managers
    from ballonet.offload.policy.tuning import DEFAULT

    sharing = replace(DEFAULT.sharing, patience=600.0, answer=600.0)
    managers.compose_with(managers.Composition(tuning=replace(DEFAULT, sharing=sharing)))


def held() -> dict[str, int]:
    """Pages of KV now, and the most that there were of all owners."""
    from ballonet.allocator import devices

    snapshot = devices.require().snapshot()
    return {"kv": snapshot["pages"]["kv"], "peak": snapshot["physical_peak"] // snapshot["page_size"]}


def fail(calls: int) -> None:
    """Lets calls that back blocks fail, as when the driver refuses."""
    import torch

    from ballonet.hooks.batching.pages import SectorPages

    stock, number = SectorPages.take, count()

    def take(self: SectorPages, *args: Any) -> None:
        if 10 <= next(number) < 10 + calls:
            raise torch.OutOfMemoryError("planted")
        stock(self, *args)

    SectorPages.take = take  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
