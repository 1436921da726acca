"""One cached sequence: the cache of a finished request, and the tokens in it; and copies of its tokens, for other
requests, for files and for blocks of continuous batching.

Note [In use by another request]
    A request of another thread only appends to its sequence, so the tokens that it began with may be read. But a
    host-mapped page of them may be mapped to a slot for a moment while that request computes. So they are read under a
    lease, which keeps pages in place, and only if all are on the device then. No lease is taken where a page is in a
    slot: the request could not map it to the host again under it.

Note [Order]
    A stream that reads waits for the stream that wrote, and one that writes for those that read: `written` and `read`
    are CUDA events. On a CPU everything is done when the call returns.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch

from ...allocator.errors import BallonetError
from ...offload.manager.kv_tier import KVTier
from ..forward.lease import ForwardLease, GroupLease
from ..kv.layer import ElasticLayer
from ..kv.ranges import CacheRanges, KVRange

Pair = tuple[torch.Tensor, torch.Tensor]


class Gone(Exception):
    """The tokens of `source` cannot be read."""

    def __init__(self, source: TokenSource) -> None:
        super().__init__(source)
        self.source = source


class TokenSource(Protocol):
    """A source of tokens: a cached sequence, a file (saving.py), or blocks of continuous batching."""

    disk: bool = False  # is the source a file?

    @property
    def away(self) -> float:
        """Fraction of it that is not on the device."""

    @property
    def near(self) -> float:
        """Fraction of it that is on a peer."""

    @property
    def held(self) -> Sequence[int]:
        """The layers that hold tokens."""

    def holds(self, layer: int) -> bool:
        """Does that layer hold tokens?"""
        return layer in self.held

    def part(self, layer: int, start: int, end: int) -> Pair:
        """Keys and values of a layer, [1, heads, end - start, dim], on the device. Gone."""

    def leased(self, end: int) -> AbstractContextManager[None]:
        """Keeps the tokens [0, end) in place. Gone."""

    def after_writes(self) -> None:
        """Makes the current stream wait for writes of the tokens, if they are not there."""
        return

    def was_read(self) -> None:
        """Notes reads that were submitted to the current stream, if the tokens may be written to."""
        return


class TokenRun(NamedTuple):
    """The tokens [start, end) of a prompt, which lie at the same place of `source`."""

    source: TokenSource
    start: int
    end: int


@dataclass(slots=True)
class Counts:
    """The counts since `manage()`."""

    requests: int = 0  # calls of generate() that asked the store
    prompts: int = 0  # tokens of their prompts
    on_device: int = 0  # tokens of them found on the device
    on_peer: int = 0
    on_host: int = 0
    on_disk: int = 0
    faster: int = 0  # tokens in files for which computing was faster than reading
    moves: int = 0  # requests that went on with the layers of a stored sequence
    copies: int = 0  # requests that copied from stored sequences
    stored: int = 0  # sequences
    evicted: int = 0  # blocks
    why_not: Counter[str] = field(default_factory=Counter)  # why requests did not ask, or left nothing

    def hit(self, tokens: int, away: float, near: float = 0.0, *, on_disk: bool = False) -> None:
        """Counts found tokens. `away`: the part of them not on the device, of which `near`: on a peer. `on_disk`: in
        files."""
        gone, on_peer = round(tokens * away), round(tokens * min(near, away))
        self.on_device += tokens - gone
        self.on_peer += on_peer
        if on_disk:
            self.on_disk += gone - on_peer
        else:
            self.on_host += gone - on_peer

    @property
    def hits(self) -> int:
        """Tokens of prompts that were not computed."""
        return self.on_device + self.on_peer + self.on_host + self.on_disk

    @property
    def hit_rate(self) -> float:
        """The part of all tokens of prompts that was found."""
        return self.hits / self.prompts if self.prompts else 0.0


class CachedSequence(TokenSource):
    """Tokens [0, n) whose keys and values lie in `layers`, except those that its ranges are missing."""

    def __init__(self, layers: Sequence[Any], ids: Sequence[int], salt: bytes, *, needs_state: bool = False) -> None:
        """`layers`: of its cache; the sequence has those that lie in ranges. `needs_state`: can it be used only behind
        a state? See index.py, Note [States]."""
        self.layers: list[Any] = [layer if isinstance(layer, ElasticLayer) else None for layer in layers]
        self.ids = array("q", ids)
        self.salt = salt
        self.keys: list[bytes] = []  # keys of its blocks; the last one may be partial
        self.first = 0  # tokens before this one belong to other sequences
        self.trim_pending = False  # pages are to be freed once no request reads them
        self.in_use = False  # a request goes on with it
        self.needs_state = needs_state
        self.readers: weakref.WeakSet[Any] = weakref.WeakSet()  # requests that are copying from it
        self.written: Any = None  # see Note [Order]
        self.read: dict[int, Any] = {}  # by stream, the last one of each
        self._noting = threading.Lock()  # guards `read`

    @property
    def used(self) -> list[ElasticLayer]:
        """The layers that hold tokens; a model may have some that never do."""
        return [layer for layer in self.layers if layer is not None and layer.is_initialized]

    @property
    def kv_ranges(self) -> list[KVRange]:
        """The ranges of the sequence."""
        return [held for layer in self.used if (held := layer.kv_range) is not None]

    @property
    def pages(self) -> int:
        """Pages of the sequence, on the device or the host."""
        return sum(kv_range.held for kv_range in self.kv_ranges)

    @property
    def device_pages(self) -> int:
        """Pages of the sequence on the device."""
        tiers = self._tiers()
        return sum(tier.client.device_pages for tier in tiers) if tiers else self.pages

    @property
    def caches(self) -> list[int]:
        """The numbers of its caches as clients of the manager."""
        return [tier.number for tier in self._tiers()]

    @property
    def missing(self) -> int:
        """Tokens, from the first one on, that have to be copied from other sequences."""
        return max((kv_range.missing for kv_range in self.kv_ranges), default=0)

    @property
    def dirty(self) -> int:
        """Full pages whose bytes only the device has: taking one needs a page of the host."""
        return sum(kv_range.pages.dirty for kv_range in self.kv_ranges)

    @property
    def fixed(self) -> int:
        """Pages that the core cannot take, as they are not full."""
        return self.pages - sum(kv_range.pages.full for kv_range in self.kv_ranges)

    @property
    def away(self) -> float:
        """Fraction of its pages on the host."""
        tiers = self._tiers()
        for tier in tiers:
            tier.extents.look()
        return sum(tier.client.displaced for tier in tiers) / max(1, self.pages)

    @property
    def near(self) -> float:
        """Part of its pages that lies on a peer."""
        return sum(tier.extents.near for tier in self._tiers()) / max(1, self.pages)

    @property
    def held(self) -> Sequence[int]:
        """The layers that hold tokens."""
        return [number for number in range(len(self.layers)) if self.holds(number)]

    def holds(self, layer: int) -> bool:
        """Does that layer hold tokens?"""
        held = self.layers[layer]
        return held is not None and bool(held.is_initialized)

    def mark_idle(self, kept: bool) -> None:
        """Tells the manager whether the sequence is only kept for later prompts, or in use. DriverError."""
        for kv_range in self.kv_ranges:
            kv_range.keep(kept)
        for tier in self._tiers():
            tier.client.only_cached = kept

    def _tiers(self) -> list[KVTier]:
        tiers = {id(layer.ranges): layer.ranges.tier for layer in self.used}
        return [tier for tier in tiers.values() if tier is not None]

    def trim(self, then: int = 0) -> None:
        """Cuts the ranges to the tokens of the sequence, and gives back all pages but those of `then` tokens."""
        for layer in self.used:
            if layer.get_seq_length() > len(self.ids):
                layer.cut(len(self.ids), then)  # only the elastic half of a hybrid layer
        for kv_range in self.kv_ranges:
            kv_range.fit(then)

    def free(self) -> None:
        """Gives all pages back."""
        for layer in self.used:
            ElasticLayer.reset(layer)
        self.layers.clear()

    def share_prefix_pages(self, tokens: int) -> None:
        """Gives back the pages of the first tokens, which another sequence has, as far as they are whole."""
        for kv_range in self.kv_ranges:
            kv_range.release_prefix(tokens)

    # -- see Note [Order]

    def was_written(self) -> None:
        """Notes writes that were submitted to the current stream."""
        stream = self._stream()
        self.written = None if stream is None else stream.record_event()

    def was_read(self) -> None:
        """Notes reads that were submitted to the current stream."""
        if (stream := self._stream()) is not None:
            with self._noting:
                self.read[stream.cuda_stream] = stream.record_event()

    def after_writes(self) -> None:
        """Makes the current stream wait for writes of the tokens."""
        if self.written is not None and (stream := self._stream()) is not None:
            stream.wait_event(self.written)

    def after_reads(self) -> None:
        """Makes the current stream wait for writes and reads of the tokens."""
        self.after_writes()
        if self.read and (stream := self._stream()) is not None:
            with self._noting:
                while self.read:
                    stream.wait_event(self.read.popitem()[1])

    def _stream(self) -> Any:
        """The current stream of this thread, None on a CPU."""
        device = next((kv_range.shape.device for kv_range in self.kv_ranges), None)
        return None if device is None or device.type != "cuda" else torch.cuda.current_stream(device)

    def part(self, layer: int, start: int, end: int) -> Pair:
        """Keys and values of a layer, for kernels to read: see ranges.py, Note [One place at a time]. Gone."""
        try:
            keys, values = self.layers[layer].part(start, end)
        except BallonetError as error:
            raise Gone(self) from error
        if end - start == 1:  # contiguous, which copies of the driver's are made of
            one = torch.zeros(1, dtype=torch.int64, device=keys.device)
            return keys.index_select(2, one), values.index_select(2, one)
        return keys, values

    @contextmanager
    def leased(self, end: int) -> Iterator[None]:
        """Keeps the tokens [0, end) in place. Gone where they cannot be read: see Note [In use by another request]."""
        if self.in_use and any(kv_range.pages.needs_wait_or_remap for kv_range in self.kv_ranges):
            raise Gone(self)
        with ExitStack() as stack:
            for group in {id(kv_range.group): kv_range.group for kv_range in self.kv_ranges}.values():
                stack.enter_context(GroupLease(group))
            if self.in_use:
                for kv_range in self.kv_ranges:
                    first, last = kv_range.geometry.pieces(kv_range.missing), kv_range.geometry.pieces(end)
                    if any(kv_range.range.leads_to(piece) != "device" for piece in range(first, last)):
                        raise Gone(self)
            yield


def copy_in(layers: Sequence[Any], rows: Sequence[Sequence[TokenRun]], pads: Sequence[int]) -> None:
    """Fills the unused `layers` of a cache with stored tokens: in row b behind pads[b] columns those of rows[b], so
    that all rows are equally long with their pads. Gone, torch.OutOfMemoryError, DriverError."""
    with reading([run for runs in rows for run in runs]) as sources:
        for number, layer in enumerate(layers):
            if not any(source.holds(number) for source in sources):
                continue
            if len(rows) == 1 and not pads[0]:
                for run in rows[0]:
                    layer.update(*run.source.part(number, run.start, run.end))
            else:
                layer.update(*_side_by_side(number, rows, pads))


def fill_in(sequence: CachedSequence, runs: Sequence[TokenRun]) -> None:
    """Copies the tokens to a sequence that its ranges are missing. `runs`: hold its tokens from the first one on. Gone,
    torch.OutOfMemoryError, DriverError; the sequence is then as before."""
    with reading(runs):
        for number, layer in enumerate(sequence.layers):
            kv_range = layer.kv_range if sequence.holds(number) else None
            if kv_range is None or not kv_range.missing:
                continue
            if not kv_range.prefix_restorable:
                raise Gone(sequence)
            with kv_range.restoring_prefix() as missing:
                for run in runs:
                    if run.start < (end := min(run.end, missing)):
                        layer.write(run.start, *run.source.part(number, run.start, end))


def taken_out(layers: Sequence[Any], row: int, start: int, end: int, ranges: CacheRanges) -> list[Any]:
    """Copies the columns [start, end) of one row of a cache to new layers over `ranges`. torch.OutOfMemoryError,
    DriverError."""
    lease = ForwardLease()
    try:
        lease.open()
        made: list[Any] = []
        for layer in layers:
            if not isinstance(layer, ElasticLayer) or not layer.is_initialized:
                made.append(None)
                continue
            states = getattr(layer, "number_of_states", 1)
            made.append(type(layer)(ranges, number=layer.number, number_of_states=states))
            if layer.kv_range is not None:
                lease.enter_group(layer.kv_range.group)
            keys, values = cast(Pair, (layer.keys, layer.values))
            made[-1].update(keys[row : row + 1, :, start:end], values[row : row + 1, :, start:end])
        return made
    finally:
        lease.close()


def _side_by_side(number: int, rows: Sequence[Sequence[TokenRun]], pads: Sequence[int]) -> Pair:
    """Joins the keys and values of a layer, [rows, heads, pads and tokens, dim]."""
    pairs = [[run.source.part(number, run.start, run.end) for run in runs] for runs in rows]
    columns = max(pad + runs[-1].end for pad, runs in zip(pads, rows, strict=True) if runs)  # others have more pads
    some = next(parts for parts in pairs if parts)[0]
    filled = tuple(states.new_zeros(len(rows), states.shape[1], columns, states.shape[3]) for states in some)
    for row, (pad, runs, parts) in enumerate(zip(pads, rows, pairs, strict=True)):
        for run, part in zip(runs, parts, strict=True):
            for into, tokens in zip(filled, part, strict=True):
                into[row : row + 1, :, pad + run.start : pad + run.end].copy_(tokens)
    return filled[0], filled[1]


@contextmanager
def reading(runs: Iterable[TokenRun]) -> Iterator[list[TokenSource]]:
    """Keeps the tokens of the runs in place, and orders the reads of the current stream. Gone."""
    ends: dict[TokenSource, int] = {}
    for run in runs:
        ends[run.source] = max(run.end, ends.get(run.source, 0))
    lease = ForwardLease()
    try:
        lease.open()
        with ExitStack() as stack:
            for source, end in ends.items():
                stack.enter_context(source.leased(end))
                source.after_writes()
            try:
                yield list(ends)
            finally:
                for source in ends:
                    source.was_read()
    finally:
        lease.close()


class StoredTokens:
    """Keys and values of the stored tokens of some runs."""

    def __init__(self, runs: Sequence[TokenRun]) -> None:
        """`runs`: at least one; their sources stay in place."""
        self._runs = runs
        self.layers = runs[0].source.held  # the layers that hold tokens

    def __call__(self, layer: int) -> Pair:
        """Returns keys and values of a layer, [1, heads, tokens, dim] on the device. Gone."""
        keys, values = zip(*(run.source.part(layer, run.start, run.end) for run in self._runs), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


@contextmanager
def open_runs(runs: Iterable[TokenRun], start: int, end: int) -> Iterator[StoredTokens | None]:
    """Keeps the tokens [start, end) of a prompt, which lie in these runs, in place; None where they cannot be read
    now."""
    runs = [run._replace(start=max(start, run.start)) for run in up_to(runs, end) if run.end > start]
    with ExitStack() as held:
        try:
            if runs:
                held.enter_context(reading(runs))
        except Gone:
            runs = []
        yield StoredTokens(runs) if runs else None


def up_to(runs: Iterable[TokenRun], end: int) -> list[TokenRun]:
    """Returns the runs of the tokens before `end`."""
    return [run._replace(end=min(run.end, end)) for run in runs if run.start < end]
