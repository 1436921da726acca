"""Requests that have to wait while others run: their KV goes to the host and stays where it is in the range, so that
their tables of blocks hold, and comes back when they are scheduled again (eLLM §4.3.2).

Note [Preempted]
    A request that is preempted keeps its blocks, unless it takes less to compute it again than to move it. Its pages,
    but for those that it shares with requests that run, become pages of the host: kernels could read them there, only
    slower. Among those that wait it is one that decodes, so that the admission lets it in before prompts, and only with
    room for all of its pages on the device.
"""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestStatus

from ..device.shared import may_grow
from .cache import ElasticPagedCache
from .scheduler import ElasticScheduler


class PagePreemption(OffloadingManager):
    """As OffloadingManager, without a pool of its own on the host."""

    cache: ElasticPagedCache
    scheduler: ElasticScheduler
    _waits = 0  # looks since a batch could be made last, with one request alone

    def _compute_num_cpu_sectors(self, cpu_offload_space_gib: float | None, safety_threshold: float) -> int:
        return 0

    def offload_requests(self) -> bool:
        """Preempts the newest of the requests that lack pages until the others have room, or one request is left; first
        blocks that nobody uses go. Was there anything to give?"""
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
        return gave or evicted or self.scheduler.memory.dares()

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Brings the KV of preempted requests that are in the batch back to the device, as far as there is room, unless
        they were admitted with it on the host."""
        for each in requests_in_batch:
            if each.state.is_cpu_offloaded:
                if each.state.request_id not in self.cache.on_host:
                    self.cache.request_pages.to_device(each.state.request_id)
                each.state.is_cpu_offloaded = False

    def free_request_cpu_cache(self, state: Any) -> None:
        """Frees nothing: its blocks go as those of any other."""
        state.is_cpu_offloaded = False

    def compute_again(self, state: Any) -> None:
        """Frees what the request has; it waits, and begins again with all of its tokens."""
        again, slo = state.create_equivalent_initial_request(), self.scheduler.promises.asked(state.request_id)
        state._status = RequestStatus.FINISHED
        self.scheduler.finish_request(state.request_id)
        self.scheduler.promises.note(state.request_id, slo)
        self.scheduler.wait_again(again)

    def _fits(self, starved: list[Any]) -> bool:
        return self.scheduler.selection.needed(starved) <= self.scheduler.memory.now().usable

    def _preempt(self, state: Any) -> None:
        if self._moves(state) and self.cache.request_pages.to_host(state.request_id):
            self._keep_for_later(state)
        else:  # or there is no room on the host
            self.compute_again(state)

    def _moves(self, state: Any) -> bool:
        """Does it take less to move what the request has to the host and back than to compute it again? What nobody
        measured is moved."""
        page, again = self.cache.pages.client.governor.link.page_seconds, self.scheduler.seconds_again(state)
        return page is None or again is None or 2 * page * self.cache.request_pages.count(state.request_id) <= again

    def may_wait(self) -> bool:
        """May a request that is alone and finds no memory wait once more for that of other models, or processes?"""
        if may_grow(self.cache.on):
            return True
        self._waits += 1
        return self._waits <= self.scheduler.tuning.lonely

    def hopeless(self) -> list[tuple[Any, Exception]]:
        """Takes those out of the queue that find too little memory, although no request runs, and did so for a while.
        Returns them with the reason."""
        return [] if not self.scheduler.alone or self.may_wait() else self.scheduler.hopeless()

    def scheduled(self) -> None:
        """Notes that a batch could be made, of requests that did not have to wait for what always stays free."""
        if not self.scheduler.memory.without_reserve:
            self._waits = 0

    def begin_again(self, requests: list[Any]) -> None:
        """A step of these found no memory in the middle: all of them are computed again, with more memory left free."""
        self.scheduler.lacked()
        for state in reversed(requests):
            self.compute_again(state)

    def _keep_for_later(self, state: Any) -> None:
        """As transformers does with what it has copied to the host: what a batch in flight computes for it is lost, so
        it goes on from the last token that is known."""
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
