"""The prefixes of one model as its user sees them: `Managed.prefixes`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.units import format_size
from ...offload.governor.client import ModelClient
from ...offload.governor.governor import Governor
from .contents import Contents
from .identity import Identity, Looks
from .limit import Limit
from .prompt_filler import PromptFiller
from .sequence_keeper import SequenceKeeper
from .stored_tokens import StoredTokens, read

Ids = torch.Tensor | Sequence[int]

_PUBLIC: Final = (
    *("block", "counts", "limit", "nbytes", "pages", "reused", "states", "tokens"),
    *("clear", "flush", "get_num_new_matched_tokens", "pin", "unpin"),
)


class PrefixStore:
    """The prefixes that are kept for one model that generates: `Managed.prefixes`.

    What `dir()` lists is public. The rest serves requests (sessions.py): `contents`, `pressure`, `keeper`, `filler`.
    """

    def __init__(
        self, model: nn.Module, device: Device, limit: int | None, governor: Governor, governed: ModelClient
    ) -> None:
        """`limit`: bytes of pages, None for any number. `governor`: of the device; it knows the model as `governed`."""
        self.contents = Contents(type(model).__name__, device, governor)
        self.counts = self.contents.counts
        self.looks = Looks(model)
        self.pressure = Limit(self.contents, limit, governed)
        self.keeper = SequenceKeeper(self.contents, self.pressure, governed)
        self.filler = PromptFiller(self.contents, self.keeper)

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f" of {format_size(self.limit)}"
        found = f"{self.counts.hit_rate:.0%} of the tokens of {self.counts.requests:,} requests were found"
        held = f"{self.tokens:,} tokens in {format_size(self.nbytes)}{limit}"
        return f"<prefixes of {self.contents.name}: {held}; {found}>"

    def __dir__(self) -> list[str]:
        return [*_PUBLIC]

    @property
    def limit(self) -> int | None:
        """Bytes of pages that may be kept, None for any number. It may be set."""
        return self.pressure.nbytes

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        self.pressure.nbytes = nbytes
        self.enforce()

    def enforce(self) -> None:
        """Evicts down to the limit. DriverError."""
        with self.contents.change():
            self.pressure.enforce()

    @property
    def block(self) -> int:
        """Tokens that are stored and evicted together."""
        return self.contents.index.blocks.block

    @property
    def pages(self) -> int:
        """Pages of kept tokens and states that are not in use, on the device or the host; of continuous batching's
        blocks only while no request has any. States are rounded up to whole pages."""
        return self.contents.pages

    @property
    def nbytes(self) -> int:
        """The bytes of `pages`."""
        return self.contents.nbytes

    @property
    def states(self) -> int:
        """Lengths of sequences at which windows and recurrent states are kept."""
        return len(self.contents.index.states)

    @property
    def tokens(self) -> int:
        """Stored tokens that are not in use, counted once in sequences and once in blocks."""
        paged = self.contents.index.blocks.paged
        blocks = paged.unused_tokens if paged is not None else 0
        return blocks + sum(len(each.ids) - each.first for each in tuple(self.contents.index.idle))

    @property
    def reused(self) -> int:
        """Tokens of each sequence that the last request of this thread did not compute."""
        return self.filler.reused

    def identity(self) -> Identity:
        """Returns the identity on which keys and values depend now, beside their tokens."""
        return self.looks.now()

    def get_num_new_matched_tokens(self, ids: Ids) -> int:
        """Returns how many tokens of a prompt, int[tokens] or a list, would not be computed now. Does not count as a
        use."""
        now, prompt = self.identity(), numbers(ids)[:-1]
        settings = now.settings
        with self.contents.lock:
            if now.weights != self.contents.weights:
                return 0
            index = self.contents.index
            if index.states:
                growing = next(iter(index.states)).growing
                _, state = index.find_state(prompt, settings, growing, peek=True)
                return len(state.ids) if state is not None else 0
            runs = index.blocks.find(prompt, settings, peek=True)
        return runs[-1].end if runs else 0

    def pin(self, ids: Ids) -> list[bytes]:
        """Keeps the blocks of these tokens, stored or not, and the state behind the last one, from being evicted until
        they are unpinned as often. Blocks may go to the host. Returns their keys."""
        settings = self.identity().settings
        with self.contents.change() as index:
            keys = index.blocks.all_keys(numbers(ids), settings)
            index.pins.add(keys)
        return keys

    def unpin(self, ids: Ids) -> None:
        """Undoes `pin`. ValueError where they are not pinned."""
        settings = self.identity().settings
        with self.contents.lock:
            keys = self.contents.index.blocks.all_keys(numbers(ids), settings)
        self.unpin_keys(keys)

    def unpin_keys(self, keys: Sequence[bytes]) -> None:
        """Undoes `pin`, which returned the keys, even if the model has other adapters since. ValueError where they are
        not pinned."""
        with self.contents.change() as index:
            pinned = index.pins.remove(keys)
            self.pressure.enforce()
        if not pinned:
            raise ValueError("these tokens are not pinned")

    def clear(self) -> None:
        """Drops everything that running requests do not use. DriverError."""
        self.contents.clear()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all stored tokens are in files, if there is a folder; returns whether that took no more than
        `timeout` seconds."""
        return self.contents.saver is None or self.contents.saver.flush(timeout)

    def close(self) -> None:
        """Stops keeping prefixes. Tokens that running requests use are freed when those end. DriverError."""
        if self.contents.saver is not None:
            self.contents.saver.close()
        with self.contents.lock:
            self.contents.closed = True
            self.contents.clear()

    def read(
        self, ids: Sequence[int], now: Identity, start: int, end: int
    ) -> AbstractContextManager[StoredTokens | None]:
        """Keeps the tokens [start, end) of a stored prompt in place: see stored_tokens.py."""
        return read(self.contents, ids, now, start, end)


def numbers(ids: Ids) -> array[int]:
    """Returns tokens on the host. ValueError for more than one sequence, TypeError for values that are no integers."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise TypeError(f"tokens are whole numbers, not {ids.dtype}")
        if ids.numel() != ids.shape[-1]:
            raise ValueError(f"tokens of one sequence are needed, not of shape {tuple(ids.shape)}")
        return array("q", ids.detach().to("cpu", torch.int64).numpy().tobytes())
    return array("q", ids)
