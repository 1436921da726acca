"""Requests that have to wait while others run: their KV goes to the host, keeps its addresses, so that tables of blocks
stay valid, and comes back when they are scheduled again (eLLM §4.3.2).

Note [Preempted]
    A preempted request keeps its blocks, unless computing it again is faster than moving it. Its pages, except those
    that it shares with running requests, become host pages: kernels could read them there, only slower. While it waits
    it counts as decoding, so that the admission takes it before prompts, and only when all of its pages fit on the
    device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestStatus

from ..device.shared import may_grow, reach
from .cache import ElasticPagedCache
from .scheduler import ElasticScheduler


class PagePreemption(OffloadingManager):
    """An OffloadingManager without a pool of its own on the host."""

    cache: ElasticPagedCache
    scheduler: ElasticScheduler
    _waits = 0  # attempts since the last batch, with one request alone
    _tries: Mapping[str, int] = {}  # by request: its steps that found no memory while no other one ran
    _again: tuple[str, int] = "", 0  # the request computed again last, and how many of its tokens had been computed

    def _compute_num_cpu_sectors(self, cpu_offload_space_gib: float | None, safety_threshold: float) -> int:
        return 0

    def offload_requests(self) -> bool:
        """Drops unused blocks, then preempts the newest of the requests that lack pages until the others fit or one is
        left. Returns whether any memory was freed."""
        self.cache.pool.try_to_free_sectors()
        starved, active = self.scheduler.starved_requests, len(self.scheduler.active_requests)
        evicted = not self._fits(starved) and self.cache.evict_kept(self.scheduler.selection.needed(starved))
        gave = False
        while starved and active > 1 and not self._fits(starved):
            state, _ = starved.pop()
            active -= 1
            gave = True
            self._preempt(state)
        self.scheduler.block_new_requests = self.scheduler.block_new_requests or gave
        return gave or evicted or self.scheduler.memory.relax_reserve()

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Restores the KV of preempted requests in the batch, as far as there are device pages, unless they were
        admitted with it on the host."""
        for each in requests_in_batch:
            if each.state.is_cpu_offloaded:
                if each.state.request_id not in self.cache.on_host:
                    self.cache.request_pages.to_device(each.state.request_id)
                each.state.is_cpu_offloaded = False

    def free_request_cpu_cache(self, state: Any) -> None:
        """Does nothing: the blocks are freed like any others."""
        state.is_cpu_offloaded = False

    def compute_again(self, state: Any) -> None:
        """Frees the request's blocks; it waits, and is computed again with all of its tokens."""
        again, slo = state.create_equivalent_initial_request(), self.scheduler.slos.asked(state.request_id)
        state._status = RequestStatus.FINISHED
        self._again = state.request_id, state.position_offset
        self.scheduler.leave(state.request_id)
        self.scheduler.slos.note(state.request_id, slo)
        self.scheduler.wait_again(again)

    def _fits(self, starved: list[Any]) -> bool:
        return self.scheduler.selection.needed(starved) <= self.scheduler.memory.now().usable

    def _preempt(self, state: Any) -> None:
        if self._moves(state) and self.cache.request_pages.to_host(state.request_id):
            self._keep_for_later(state)
        else:  # or the host is full
            self.compute_again(state)

    def _moves(self, state: Any) -> bool:
        """Is moving the request's KV to the host and back faster than computing it again? True where times are
        unknown."""
        page, again = self.cache.pages.client.governor.link.page_seconds, self.scheduler.seconds_again(state)
        return page is None or again is None or 2 * page * self.cache.request_pages.count(state.request_id) <= again

    def may_wait(self) -> bool:
        """May a lone request that finds no memory wait once more for other models or processes to free some?"""
        if may_grow(self.cache.on):
            return True
        self._waits += 1
        return self._waits <= self.scheduler.tuning.lonely

    def may_try_again(self, request: str) -> bool:
        """May a request be computed again although it was alone in a step that found no memory? A few times, and only
        where other processes that share the budget, or other models, could free some meanwhile."""
        scheduler, on = self.scheduler, self.cache.on
        if reach(on) <= on.budget and not scheduler.others_run():
            return False
        live = scheduler.active_requests.keys() | scheduler.waiting_requests.keys()
        self._tries = {name: tries for name, tries in self._tries.items() if name in live}
        self._tries[request] = self._tries.get(request, 0) + 1
        scheduler.memory.without_reserve, self._waits = False, 0
        return self._tries[request] <= scheduler.tuning.tries

    def hopeless(self) -> list[tuple[Any, Exception]]:
        """Takes requests out of the queue that have found too little memory for a while although no request runs.
        Returns them with the reason."""
        return [] if not self.scheduler.alone or self.may_wait() else self.scheduler.hopeless()

    def scheduled(self) -> None:
        """Notes that a batch was made: without using the reserve, and not only of a request that comes as far again as
        it had come."""
        active, (name, reached) = self.scheduler.active_requests, self._again
        further = len(active) > 1 or name not in active or active[name].position_offset > reached
        if further and not self.scheduler.memory.without_reserve:
            self._waits = 0

    def begin_again(self, requests: list[Any]) -> None:
        """Computes these requests again, with more memory left free, as their step ran out of memory."""
        self.scheduler.raise_reserve()
        for state in reversed(requests):
            self.compute_again(state)

    def _keep_for_later(self, state: Any) -> None:
        """Puts a preempted request back into the queue, as transformers does with one that it has copied to the host.
        The result of a batch in flight is lost, so it goes on from the last known token."""
        if state.status == RequestStatus.DECODING:
            if state.position_offset == len(state.initial_tokens) + len(state.generated_tokens):
                state.position_offset -= 1
                state.remaining_prefill_tokens = [(state.generated_tokens or state.initial_tokens)[-1]]
            else:
                state.remaining_prefill_tokens = state.tokens_to_process[:]
        state._status = RequestStatus.PENDING
        state.is_cpu_offloaded = True
        self.scheduler.active_requests.pop(state.request_id, None)
        self.scheduler.wait_again(state)
