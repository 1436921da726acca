"""Measures the costs of a model's steps on this machine, as it answers a few requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...allocator import devices, install
from ...allocator.errors import ManageError
from ...offload.policy.step_costs import Parts
from ...offload.policy.tuning import DEFAULT
from ..batching import seams
from ..manage import managed
from ..options import ManageOptions
from ..server.arrivals import RecordedArrival


def measure_steps(
    name: str,
    arrivals: Sequence[RecordedArrival],
    budget: int,
    host_budget: int,
    page_size: int,
    batching: dict[str, Any],
) -> tuple[Parts, float]:
    """Loads a model, answers a few requests like `arrivals` in batches as large as memory allows, and returns (costs of
    steps, median relative error). ManageError where too few steps ran; OSError, torch.OutOfMemoryError."""
    from transformers import AutoModelForCausalLM

    tuning = DEFAULT.serving
    install.install(budget, page_size=page_size, host_budget=host_budget)
    try:
        ordinal, kind = devices.require().ordinal, devices.require().kind
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        model = model.to(f"cuda:{ordinal}" if kind == "cuda" else "cpu").eval()
        handle = managed(model, ManageOptions(batches="full"))
        try:
            draw = random.Random(0)
            highest = model.config.get_text_config().vocab_size
            settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
            with model.continuous_batching_context_manager(
                generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**batching)
            ) as manager:
                asked = arrivals[: tuning.sample]
                for arrival in asked:
                    prompt = [draw.randrange(highest) for _ in range(min(arrival.prompt, tuning.prompt))]
                    manager.add_request(prompt, max_new_tokens=draw.randint(2, tuning.answer))
                done = 0
                while done < len(asked) and manager.is_running():
                    done += manager.get_result(timeout=1) is not None
            batched = seams.batched(model)
            parts, error = (None, None) if batched is None else (batched.costs.parts, batched.costs.error)
        finally:
            handle.release()
    finally:
        install.restore()
    if parts is None or error is None:
        raise ManageError(f"{name}: too few steps ran to say what they take: give more requests, or --costs FILE")
    return parts, error
