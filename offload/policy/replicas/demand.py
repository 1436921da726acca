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
    """Bytes: of a `token`'s KV in all layers, and of a `page`. ValueError where one is below 1."""

    token: int
    page: int

    def __post_init__(self) -> None:
        if self.token < 1 or self.page < 1:
            raise ValueError("a token of KV and a page have at least one byte")

    def pages(self, tokens: int) -> int:
        """Returns the whole pages for so many tokens of one request."""
        return -(-tokens * self.token // self.page)


def prompt_pages(prompts: Iterable[int], kv: KVSize) -> int:
    """Returns the pages for prompts of so many tokens, each with one generated token."""
    return sum(kv.pages(tokens + 1) for tokens in prompts)


def needed_pages(pending: int, free: int) -> int:
    """Returns R of Fig. 6: the pages that `pending` needs beyond the `free` ones."""
    return max(0, pending - free)


def apart_tokens(k: int, memory: int, model: int, token: int) -> int:
    """Returns the tokens of KV of k instances that each hold the model. Bytes: `memory` of each, `model`, `token`."""
    return k * max(0, memory - model) // token


def merged_tokens(k: int, memory: int, model: int, token: int) -> int:
    """Returns the tokens of KV of k instances that hold the model once; arguments as for `apart_tokens`. See
    Note [Capacity]."""
    return max(0, k * memory - model) // token


def kv_pages(group: Group, capacity: Mapping[int, int], pages: Sequence[int]) -> dict[int, int]:
    """Returns each member's pages for KV: its `capacity` less its span's and its slot's. `pages`: of each layer."""
    return {
        member: max(0, capacity[member] - sum(pages[span.begin : span.end]) - slot(span, pages))
        for member, span in zip(group.members, group.spans, strict=True)
    }


def group_tokens(group: Group, room: Mapping[int, int], kv: KVSize) -> int:
    """Returns the tokens of KV that a group can hold: the fewest that fit any member's `room`, in pages. See
    Note [Capacity]."""
    return min(
        room[member] * kv.page * group.layers // (kv.token * len(span))
        for member, span in zip(group.members, group.spans, strict=True)
    )
