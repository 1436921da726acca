"""The memory of a batch beside weights and KV, and the largest batch under a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes per token, as transformers works them out. `token`: a new token's activations and inputs. `read`: copies of
    the keys and values of a token that is read, and its indices. `kv`: a token's own KV in one layer."""

    token: int
    read: int
    kv: int

    @classmethod
    def of_handler(cls, handler: PagedAttentionMemoryHandler, layers: int) -> Sizes:
        """Makes the sizes of a cache with so many layers, from its memory handler."""
        return cls(
            handler.bytes_per_batch_token,
            handler.bytes_per_cache_token,
            handler.bytes_per_block // max(1, layers * handler.cb_config.page_size),
        )

    def of(self, new: int, held: int) -> int:
        """Bytes at the peak of a request that has so many new tokens and reads those it holds."""
        return new * self.token + (new + held) * self.read

    def staging(self, new: int) -> int:
        """Bytes of one layer's new KV, while it goes to the host."""
        return new * self.kv


def largest_batch(budget: int, part: int, sizes: Sizes, masks: int, itemsize: int, most: int) -> int:
    """New tokens that a batch may have at most so that their tensors, and masks [tokens, tokens + read] with as many
    read as the same part of the budget holds, take no more than 1/`part` of it. At least 16, at most `most`."""
    room = budget // part
    low, high = 16, max(16, most)
    while low < high:
        tokens = (low + high + 1) // 2
        if tokens * sizes.token + masks * itemsize * tokens * tokens <= room:
            low = tokens
        else:
            high = tokens - 1
    return low


def readable(budget: int, part: int, batch: int, masks: int, itemsize: int, indices: int, most: int) -> int:
    """Tokens that may be read in one step so that masks [batch, batch + tokens], and so many indices of 8 bytes for
    each token, take no more than 1/`part` of the budget; at most `most`."""
    return max(1, min(most, budget // (part * (masks * itemsize * batch + 8 * indices)) - batch))


def masks_of(handler: Any) -> int:
    """Masks that the attention of this model needs, for each batch that is in flight."""
    return int(handler.num_attention_masks * handler.io_multiplier)
