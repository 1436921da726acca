"""Settings of continuous batching, the same on all stages of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`batching`: the resolved ContinuousBatchingConfig; `helper`: transformers' distributed helper, for the cache;
    `processors`: its logit processors, for the inputs."""

    batching: Any
    helper: Any
    processors: Any

    @property
    def block(self) -> int:
        """Tokens of a block of KV."""
        return int(self.batching.page_size)

    @classmethod
    def of(cls, model: Any, max_batch_tokens: int, **batching: Any) -> Self:
        """Resolves the settings for a model, and sets its attention to a paged one. `max_batch_tokens`: new tokens of
        an iteration, the same on all stages; `batching`: other settings of ContinuousBatchingConfig. Blocks are not
        shared between requests, as stages would evict different ones; no CUDA graph is captured, as the forward of a
        stage ends in the middle of the model."""
        given = ContinuousBatchingConfig(
            **{
                **batching,
                "max_batch_tokens": max_batch_tokens,
                "allow_block_sharing": False,
                "use_cuda_graph": False,
                "use_async_batching": False,
            }
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=given)
        return cls(manager.continuous_batching_config, manager.distributed_helper, manager.logit_processor)
