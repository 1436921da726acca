"""The memory for KV and activations of the requests of a generation loop: now, beside the reserve, and at most."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ...allocator.errors import DriverError, RequestTooLarge, SequenceTooLong
from ...offload.policy.admission import RESERVE, Admission, LogicalBuffer, Memory, can_ever_run
from ...offload.policy.reclaim_order import PageSource
from ...offload.policy.tuning import DEFAULT, Serving
from ..device.shared import reach
from ..weights.ranges import host_pages_left
from .cache import ElasticPagedCache
from .pages import SectorPages


class RequestMemory:
    """The memory of one loop's requests. Used by its thread, but for `refusal`."""

    def __init__(
        self,
        cache: ElasticPagedCache,
        measured: Callable[[], Memory],
        most: Callable[[], Memory],
        tuning: Serving = DEFAULT.serving,
    ) -> None:
        """`measured`: returns the memory for KV and activations now; `most`: once no request runs any more."""
        self._cache = cache
        self._measured = measured
        self._most = most
        self.extra_reserve = 0  # bytes that stay free beside the reserve
        self.without_reserve = False  # may one request have all that is free?
        self._needed = 0  # bytes for activations of the last batch, as estimated
        self._grown = 0, 0  # bytes idle in the heap after a batch for which it could grow freely, and of its estimate
        host: int = cache.on.snapshot()["host_budget"] if cache.on.host_pages else 0
        host = int(tuning.most * host)
        self.buffer = LogicalBuffer(host, cache.on.page_size, host, tuning)
        self._aside = 0 if tuning.activations_give else _stock_aside(cache, measured())  # bytes for activations only

    def now(self, *, plain: bool = False) -> Memory:
        """The memory that the requests of a batch may use; `plain`: if nothing were added to the reserve."""
        now = self._measured()
        used = self._cache.pages.client.displaced * self._cache.on.page_size
        host = min(now.host, self.buffer.usable(used))
        extra = self._aside if plain else self._aside + self.extra_reserve
        return replace(now, reserve=now.reserve + extra, host=host)

    def free(self) -> Memory:
        """The memory that one request may use while no other one runs."""
        return replace(self._measured(), reserve=0)

    @property
    def idle(self) -> int:
        """Bytes that lie idle in the heap."""
        return self._measured().activations

    def refusal(self, request: str, prompt: int, new: int) -> RequestTooLarge | SequenceTooLong | None:
        """Returns why a request of so many tokens, and so many new ones, can never run; None where it can. On any
        thread."""
        positions = self._cache.model.positions
        if positions is not None and prompt + max(0, new - 1) > positions:  # the last token is not computed with
            return SequenceTooLong(request, prompt, new, positions)
        return self.refused(request, prompt, new, self._most())

    def refused(self, request: str, prompt: int, new: int, most: Memory) -> RequestTooLarge | None:
        """Returns why `most` is too little for a request; None where it is enough."""
        cache = self._cache
        staging = cache.sizes.of(min(prompt, cache.max_batch_tokens), prompt + new)
        needed, most_read = cache.bytes_of(prompt + new) + staging, cache.max_tokens_read
        most = replace(most, reserve=most.reserve + self._aside)
        if not can_ever_run(needed, staging, most):
            return RequestTooLarge(request, needed, most.total - most.reserve, most.host)
        if prompt + new > most_read:
            return RequestTooLarge(request, needed, most.total - most.reserve, most.host, (prompt + new, most_read))
        return None

    @property
    def lacking(self) -> int:
        """Pages that the activations of the next step take beside those that lie idle in the heap."""
        return max(0, self._needed - self.idle) // self._cache.on.page_size

    def make_room(self, admission: Admission) -> None:
        """Frees pages of idle KV before new KV takes idle pages of the heap. Activations use the latter in each step
        and would have to map them again, so the heap keeps twice what they are estimated to take, or what it had for
        such a batch when it could grow: tensors share few pages."""
        page, now, free = self._cache.on.page_size, self._measured(), self._cache.on.available
        if free * page >= now.activations:
            self._grown = now.activations, self._needed
        self._needed = admission.activations
        grown, needed = self._grown
        grown = grown if 2 * admission.activations >= needed else 0
        beside = max(0, now.activations - max(2 * admission.activations, grown)) - max(0, grown - now.activations)
        spare = free + beside // page
        lacking = admission.kv // page - spare
        if lacking > 0:
            lacking = max(lacking, now.reserve // page)
            with suppress(DriverError):
                lacking -= self._cache.pages.client.manager.sources.reclaim(PageSource.IDLE_KV, lacking)
            if lacking > 0:
                self._cache.evict_kept(lacking * page)

    def drop_unmovable(self) -> None:
        """Drops KV that is only kept for prompts, once there is no request, and that the host has no room for: nobody
        could take its pages."""
        excess = self._cache.pages.client.device_pages - host_pages_left(self._cache.on)
        if excess > 0:
            self._cache.evict_kept(excess * self._cache.on.page_size)

    def raise_reserve(self) -> None:
        """Keeps more memory free from now on, as an admitted step ran out of memory."""
        self.extra_reserve += max(self.extra_reserve, self._measured().reserve)

    def relax_reserve(self) -> None:
        """Keeps half as much free beside the plain reserve from now on."""
        self.extra_reserve //= 2


def pages_lacking(memory: weakref.ref[RequestMemory]) -> int:
    """Pages that the activations of the next step take beside those that lie idle in the heap; 0 once the loop of this
    memory is gone."""
    now = memory()
    return 0 if now is None else now.lacking


def _stock_aside(cache: ElasticPagedCache, memory: Memory) -> int:
    """Bytes that stock sets aside for the activations of the largest batch, which reads all KV that fits."""
    sizes, batch = cache.sizes, cache.sizes.of(cache.max_batch_tokens, 0)
    kv = cache.bytes_per_sector / cache.tokens_per_sector
    return batch + round(max(0, memory.total - batch) * sizes.read / (kv + sizes.read))


def memory_of(pages: SectorPages) -> Memory:
    """Returns Algorithm 1's P_T for requests with these pages: free pages, pages that other clients have published to
    give, and own pages that no request of the batch reads. Free blocks of the heap are for activations."""
    device, client, manager = pages.device, pages.client, pages.client.manager
    idle: int = device.snapshot()["heap"]["cached"]
    page, host = device.page_size, host_pages_left(device)
    resting, offered = min(client.resting, host), manager.reclaim.offered(client.number)
    return Memory(
        0,
        idle,
        (device.available + offered.pages + resting) * page,
        (host - resting) * page,
        device.budget // RESERVE,
        dirty=(offered.dirty + resting) * page,
        room=host * page,
        in_use=offered.in_use * page,
    )


def most_of(pages: SectorPages) -> Memory:
    """Returns the memory that a request could use once all others, of all models, have ended: all except weights that
    no client gives; on the host the pages that are left and those of displaced bytes."""
    device, client, manager = pages.device, pages.client, pages.client.manager
    weights = device.snapshot()["pages"]["weights"]
    given = min(weights, manager.reclaim.offered(client.number).pages)
    total = reach(device) - (weights - given) * device.page_size
    host = (host_pages_left(device) + manager.displaced) * device.page_size
    return Memory(0, 0, total, host, device.budget // RESERVE)
