"""The layers that each simulated replica holds, and those that it pulls, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...offload.policy.replicas.events import Reason
from ...offload.policy.replicas.restore_plan import Pull
from .process_states import ProcessStates

if TYPE_CHECKING:
    from .fleet_run import FleetRun


@dataclass(eq=False, slots=True)
class _Chain:
    pulls: deque[Pull]  # that remain; the first is under way
    done: Callable[[], None]
    failed: Callable[[Reason], None]
    source: int | None = None  # of the first pull


class LayerPulls:
    """Pulls a layer from its named source, or from the puller's own backing where the source has ended or no longer
    holds it. `held`: layers by replica; `changed`: replicas whose weights' file has changed."""

    def __init__(self, run: FleetRun, processes: ProcessStates, on_pulled: Callable[[int], None]) -> None:
        """`on_pulled`: called with each replica that has pulled a layer."""
        self.held: dict[int, set[int]] = {}
        self.changed: set[int] = set()
        self._run = run
        self._processes = processes
        self._on_pulled = on_pulled
        self._chains: dict[int, _Chain] = {}

    def begin(
        self, member: int, pulls: Iterable[Pull], done: Callable[[], None], failed: Callable[[Reason], None]
    ) -> None:
        """Has a replica pull these layers, and no others; then calls `done`, or `failed` with the reason."""
        self.cancel(member)
        chain = self._chains[member] = _Chain(deque(pulls), done, failed)
        self._next(member, chain)

    def cancel(self, member: int) -> None:
        """Cancels the pulls of a replica."""
        chain = self._chains.pop(member, None)
        if chain is not None:
            self._cancel_sends(member, chain)

    def lose(self, source: int) -> None:
        """Has layers that were pulled from a replica that has ended come from their backing."""
        for member, chain in [*self._chains.items()]:
            if chain.source == source and member != source:
                self._cancel_sends(member, chain)
                self._next(member, chain)

    def missing(self, member: int) -> int:
        """Returns the bytes of the layers that a replica does not hold."""
        layers = self._run.fleet.shape.layers
        return sum(nbytes for layer, nbytes in enumerate(layers) if layer not in self.held[member])

    def _cancel_sends(self, member: int, chain: _Chain) -> None:
        links = self._run.links_of(member) if chain.source is None else [self._run.link_of(chain.source)]
        for link in links:
            link.cancel(chain)

    def _next(self, member: int, chain: _Chain) -> None:
        held = self.held[member]
        while chain.pulls and chain.pulls[0].layer in held:
            chain.pulls.popleft()
        if not chain.pulls:
            self._end(member, chain.done)
            return
        first = chain.pulls[0]
        source = first.source
        gone = source is None or source in self._processes.ended or first.layer not in self.held[source]
        chain.source = None if gone else source
        if chain.source is None and member in self.changed:
            self._end(member, lambda: chain.failed(Reason.FILE_CHANGED))
            return
        run = self._run
        link = run.host_link(member, back=True) if chain.source is None else run.link_of(chain.source)
        link.send(run.fleet.shape.layers[first.layer], lambda: self._arrived(member, chain, first.layer), owner=chain)

    def _arrived(self, member: int, chain: _Chain, layer: int) -> None:
        def takes() -> None:
            if self._chains.get(member) is chain and chain.pulls[0].layer == layer:
                self.held[member].add(layer)
                self._on_pulled(member)
                self._next(member, chain)

        self._processes.schedule(member, takes)

    def _end(self, member: int, report: Callable[[], None]) -> None:
        del self._chains[member]
        self._processes.schedule(member, report)
