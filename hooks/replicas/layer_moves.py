"""Moves layers of a replica: prepares drops, drops, restores layers, and sends layers to others that restore theirs.

Note [Pulled layers]
    A replica restores a layer by asking a holder for it over their link, and waiting for the tensors; without such a
    link the layer comes from its own backing. While it waits it answers the requests of others: otherwise two that pull
    from each other would deadlock.

    A lone replica that lacks layers reserves their pages at once, while it has no KV, and restores the layers between
    its microbatches: from its backing, until the supervisor sends a source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from ...allocator.errors import BallonetError, DropRefused, WeightsFileChanged
from ...offload.policy.replicas import protocol
from ...offload.policy.replicas.drops import Pull
from ...offload.policy.replicas.groups import Group
from ...offload.policy.replicas.protocol import Reason
from ...offload.policy.replicas.tuning import DEFAULT, ReplicaTuning
from .channel import SupervisorChannel
from .errors import Interrupted, LinkError, NoAnswer
from .held_layers import HeldLayers, Source
from .link import Link
from .messages import ENDS_PULL
from .microbatch_plan import SplitPolicy, record_of, split_by_tokens, tensor_of
from .recording import Notes
from .replica_model import ReplicaModel
from .stage import Stage


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """The parts of a replica, the same in all epochs. `me`: its number; `layers`: of the model; `connect(epoch, peer)`:
    starts to form a link; `clock`: in seconds; `split`: makes microbatches; `notes`: bars of a timeline; `make_stage`:
    makes a stage of a group."""

    me: int
    replica: ReplicaModel
    layers: int
    holds: HeldLayers
    supervisor: SupervisorChannel
    connect: Callable[[int, int], Link]
    clock: Callable[[], float]
    split: SplitPolicy = split_by_tokens
    tuning: ReplicaTuning = DEFAULT
    notes: Notes = field(default_factory=lambda: Notes(time.monotonic))
    make_stage: Callable[..., Stage] = Stage


class LayerMoves:
    """Moves layers. Used by one thread. `pulling`: layers are being restored; `ready`: all are prepared for a drop, or
    an error that `prepare` will raise has stopped that; `sent`: bytes of layers sent to others."""

    def __init__(self, setup: ReplicaSetup, beat: Callable[[], object], links: Callable[[], Iterable[Link]]) -> None:
        """`beat`: called during waits; `links`: returns the links over which others may ask for layers."""
        self.pulling = False
        self.ready = False
        self.sent = 0
        self._setup = setup
        self._beat = beat
        self._links = links
        self._preparing: Iterator[object] | None = None
        self._pulls: Iterator[object] = iter(())
        self._epoch = -1  # of the pull

    # -- ready to be dropped

    def prepare(self) -> bool:
        """Prepares one more layer for a drop. False once all are. Raises as HeldLayers.prepare."""
        if self._preparing is None:
            self._preparing = self._setup.holds.prepare(range(self._setup.layers))
        if next(self._preparing, None) is not None:
            return True
        self._preparing = None
        return False

    def prepare_anew(self) -> None:
        """Has the next `prepare` check all layers again: their files may have changed."""
        self._preparing = None

    def prepare_idle(self) -> bool:
        """Prepares one more layer while the replica is idle, ignoring errors. Returns whether there may be more."""
        try:
            self.ready = not self.prepare()
        except (BallonetError, torch.OutOfMemoryError):
            self._preparing, self.ready = None, True
        return not self.ready

    # -- drop and release

    def drop_outside_span(self, group: Group) -> None:
        """Drops the layers outside of this replica's span; reserves pages for dropped layers if it is alone."""
        if not group.is_dropped:
            self._setup.holds.keep_room()
            return
        span, notes = group.span(self._setup.me), self._setup.notes
        notes.now("layers", f"drop to layers {span.begin} to {span.end - 1}")
        self._setup.holds.drop(span)
        notes.now("layers", None)

    def restore_own_layers(self, group: Group, epoch: int) -> None:
        """Begins to restore the layers that a lone replica lacks, from its backing; call `pull`."""
        dropped = () if group.is_dropped else self._setup.holds.dropped
        if dropped:
            self.begin(epoch, [Pull(self._setup.me, layer, None) for layer in dropped], {})

    def release(self, group: Group) -> None:
        """Lets the manager decide about all layers again, if the group drops none and none is being restored."""
        if not group.is_dropped and not self.pulling:
            self._setup.holds.release()

    # -- restore

    def begin(self, epoch: int, pulls: Iterable[Pull], links: Mapping[int, Link]) -> None:
        """Begins to restore layers; call `pull`."""
        self._pulls = self.pull_all(pulls, links)
        self.pulling, self._epoch = True, epoch

    def stop(self, epoch: int | None = None) -> None:
        """Stops restoring layers: those of this epoch; None: of any."""
        self.pulling &= epoch is not None and self._epoch != epoch

    def pull(self) -> bool:
        """Restores the next layer. False once all are resident. LinkError and Interrupted end the pull; so do other
        errors, which are reported to the supervisor and not raised."""
        me, supervisor = self._setup.me, self._setup.supervisor
        try:
            if next(self._pulls, None) is not None:
                return True
        except (Interrupted, LinkError):
            self.pulling = False
            raise
        except (BallonetError, torch.OutOfMemoryError) as error:
            self.pulling = False
            supervisor.post(protocol.PullFailed(0.0, self._epoch, me, reason_of(error)))
            return True
        self.pulling = False
        return False

    def post_restored(self) -> None:
        """Reports to the supervisor that all layers are restored."""
        self._setup.supervisor.post(protocol.Restored(0.0, self._epoch, self._setup.me))

    def pull_all(self, pulls: Iterable[Pull], links: Mapping[int, Link]) -> Iterator[object]:
        """Restores this replica's layers, one in each step, from a peer if there is a link to it, else from the
        backing."""
        for pull in pulls:
            if pull.member != self._setup.me:
                continue
            link = None if pull.source is None else links.get(pull.source)
            source = None if link is None or link.error is not None else self._source_over(link)
            yield from self._setup.holds.restore((pull.layer,), source)

    def _source_over(self, link: Link) -> Source:
        def weights(layer: int) -> dict[str, torch.Tensor]:
            link.send(tensor_of(layer), "pull", urgent=True)
            names = record_of(self._wait(link, "layer"), list[str])
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                tensors[name] = self._wait(link, "weights")
                self._beat()  # `_wait` beats only in long waits, and there may be many tensors
            return tensors

        return weights

    def _wait(self, link: Link, tag: str) -> torch.Tensor:
        ends = partial(self._setup.supervisor.has_kind, ENDS_PULL)
        while True:
            self.serve()
            try:
                return link.recv(tag, self._setup.tuning.beat, lambda: ends() or self._is_asked())
            except NoAnswer:
                self._beat()
            except Interrupted:
                if ends():
                    raise

    # -- to others

    def _is_asked(self) -> bool:
        return any(link.error is None and link.has("pull") for link in self._links())

    def serve(self) -> None:
        """Sends the layers that others have asked for."""
        for link in self._links():
            while link.error is None and link.has("pull") and (asked := link.take("pull")) is not None:
                self._send(link, record_of(asked, int))

    def _send(self, link: Link, layer: int) -> None:
        tensors = self._setup.holds.tensors(layer)
        link.send(tensor_of([*tensors]), "layer", urgent=True)
        for tensor in tensors.values():
            link.send(tensor, "weights")  # whoever gets it compares it with its own
            self.sent += tensor.nbytes
            self._beat()


def reason_of(error: Exception) -> Reason:
    """Returns the reason to report for an error in preparing or restoring layers."""
    if isinstance(error, WeightsFileChanged):
        return Reason.FILE_CHANGED
    return Reason.HOST_MEMORY if isinstance(error, DropRefused) else Reason.PAGES
