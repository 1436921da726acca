"""How much memory queued prompts need, and how many tokens of KV fit into a group (paper 003, §4.1).

Note [Capacity]
    An instance with B bytes for layers and KV, of which the model takes M, has (B - M) / κ tokens of KV, at κ bytes a
    token. k of them have k(B - M) / κ. Merged they hold one model together, and each keeps the KV of its own layers,
    κ / k a token: (kB - M) / κ tokens. A request must lie in one group as a whole, so a merge also allows longer ones.
    Spans are rarely equal, so `group_tokens` asks each member how many tokens of *its* layers fit beside its span and
    its slot; the fewest count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .drop_plan import slot
from .groups import Group


@dataclass(frozen=True, slots=True)
class KVSize:
    """Bytes of KV that a `token` has in all layers, and of a `page`. ValueError."""

    token: int
    page: int

    def __post_init__(self) -> None:
        if self.token < 1 or self.page < 1:
            raise ValueError("a token of KV and a page have at least one byte")

    def pages(self, tokens: int) -> int:
        """Whole pages that tokens of one request take."""
        return -(-tokens * self.token // self.page)


def prompt_pages(prompts: Iterable[int], kv: KVSize) -> int:
    """Pages of prompts of so many tokens, each with the one that it generates first."""
    return sum(kv.pages(tokens + 1) for tokens in prompts)


def needed_pages(pending: int, free: int) -> int:
    """R of Fig. 6: pages that what is `pending` needs beyond those that are `free`."""
    return max(0, pending - free)


def apart_tokens(k: int, memory: int, model: int, token: int) -> int:
    """Tokens of KV of k instances that each hold the model. Bytes: `memory` of each, of the `model`, of a `token`."""
    return k * max(0, memory - model) // token


def merged_tokens(k: int, memory: int, model: int, token: int) -> int:
    """Tokens of KV of k instances that hold the model once. In bytes, as `apart_tokens`. See Note [Capacity]."""
    return max(0, k * memory - model) // token


def kv_pages(group: Group, capacity: Mapping[int, int], pages: Sequence[int]) -> dict[int, int]:
    """Pages that each member has for KV: its `capacity` less those of its span and its slot; `pages` of each layer."""
    return {
        member: max(0, capacity[member] - sum(pages[span.begin : span.end]) - slot(span, pages))
        for member, span in zip(group.members, group.spans, strict=True)
    }


def group_tokens(group: Group, room: Mapping[int, int], kv: KVSize) -> int:
    """Tokens of KV for which each member has `room`, in pages: the fewest of any. See Note [Capacity]."""
    return min(
        room[member] * kv.page * group.layers // (kv.token * len(span))
        for member, span in zip(group.members, group.spans, strict=True)
    )
