"""Layers of a replica on their way: made ready to be dropped, brought home, and sent to others that bring theirs home.

Note [Pulled layers]
    Who brings a layer home asks the replica that holds it, over their link, and waits for the tensors; where there is
    no such link the layer comes from its own backing. While it waits it sends what others ask for: two that pull from
    each other would wait for ever otherwise.

    Who is on its own and lacks layers keeps their pages from KV at once, while it has none, and brings them home
    between its microbatches: from its backing, until the supervisor says from where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from ...allocator.errors import BallonetError, DropRefused, WeightsFileChanged
from ...offload.policy.replicas import events
from ...offload.policy.replicas.events import Reason
from ...offload.policy.replicas.groups import Group
from ...offload.policy.replicas.restore_plan import Pull
from ..weights.layers import decoder_layers
from .errors import Interrupted, LinkError
from .held_layers import Source
from .link import Link
from .messages import ENDS_PULL
from .replica_setup import ReplicaSetup
from .stage import WatchedLink
from .stage_link import tensor_of, text_of


class LayerMoves:
    """Used by one thread. `pulling`: layers come home; `ready`: all can be dropped at once, or it is said why not when
    that is asked for; `sent`: bytes of layers that went to others."""

    def __init__(self, setup: ReplicaSetup, beat: Callable[[], object], links: Callable[[], Iterable[Link]]) -> None:
        """`beat`: is called while something is waited for; `links`: all that others may ask for layers over."""
        self.pulling = False
        self.ready = False
        self.sent = 0
        self._setup = setup
        self._beat = beat
        self._links = links
        self._preparing: Iterator[object] | None = None
        self._pulls: Iterator[object] = iter(())
        self._epoch = -1  # that the pull is of

    # -- ready to be dropped

    def prepare(self) -> bool:
        """Makes one more layer ready. False once all are. What HeldLayers.prepare raises."""
        if self._preparing is None:
            self._preparing = self._setup.holds.prepare(range(self._setup.layers))
        if next(self._preparing, None) is not None:
            return True
        self._preparing = None
        return False

    def prepare_anew(self) -> None:
        """The next `prepare` looks at all layers: files may have changed since they were made ready."""
        self._preparing = None

    def prepare_idle(self) -> bool:
        """The same while there is nothing else to do."""
        try:
            self.ready = not self.prepare()
        except (BallonetError, torch.OutOfMemoryError):
            self._preparing, self.ready = None, True
        return not self.ready

    # -- held and not

    def hold(self, group: Group) -> None:
        """Drops the layers that are not of this replica's span."""
        if not group.is_dropped:
            self._setup.holds.keep_room()
            return
        span, notes = group.span(self._setup.me), self._setup.notes
        notes.now("layers", f"drop to layers {span.begin} to {span.end - 1}")
        self._setup.holds.drop(span)
        notes.now("layers", None)

    def go_home(self, group: Group, epoch: int) -> None:
        """Layers that a replica on its own lacks come home from now on; call `pull`."""
        dropped = () if group.is_dropped else self._setup.holds.dropped
        if dropped:
            self.begin(epoch, [Pull(self._setup.me, layer, None) for layer in dropped], {})

    def release(self, group: Group) -> None:
        """Layers are a usual plan's again, where the group drops none and none is on its way."""
        if not group.is_dropped and not self.pulling:
            self._setup.holds.release()

    # -- home

    def begin(self, epoch: int, pulls: Iterable[Pull], links: Mapping[int, Link]) -> None:
        """Layers come home from now on; call `pull`."""
        self._pulls = self.pulled(pulls, links)
        self.pulling, self._epoch = True, epoch

    def stop(self, epoch: int | None = None) -> None:
        """No more layers come home, of this epoch, or at all."""
        self.pulling &= epoch is not None and self._epoch != epoch

    def pull(self) -> bool:
        """Brings the next layer home. False once all are here, and `Restored` is posted. LinkError, Interrupted: the
        pull has ended. Other errors end it too, and the supervisor is told."""
        me, supervisor = self._setup.me, self._setup.supervisor
        try:
            if next(self._pulls, None) is not None:
                return True
        except (Interrupted, LinkError):
            self.pulling = False
            raise
        except (BallonetError, torch.OutOfMemoryError) as error:
            self.pulling = False
            supervisor.post(events.PullFailed(0.0, self._epoch, me, reason_of(error)))
            return True
        self.pulling = False
        return False

    def post_restored(self) -> None:
        """All layers are home."""
        self._setup.supervisor.post(events.Restored(0.0, self._epoch, self._setup.me))

    def pulled(self, pulls: Iterable[Pull], links: Mapping[int, Link]) -> Iterator[object]:
        """Brings layers home one by one, from a peer where there is a link to it, else from their backing."""
        for each in pulls:
            if each.member != self._setup.me:
                continue
            link = None if each.source is None else links.get(each.source)
            source = None if link is None or link.error is not None else self._from(link)
            yield from self._setup.holds.restore((each.layer,), source)

    def _from(self, link: Link) -> Source:
        def weights(layer: int) -> dict[str, torch.Tensor]:
            link.send(tensor_of(str(layer)), "pull", urgent=True)
            names = json.loads(text_of(self._wait(link, "layer")))
            found: dict[str, torch.Tensor] = {}
            for name in names:
                found[name] = self._wait(link, "weights")
                self._beat()  # they may come fast enough to be waited for shortly, and be many
            return found

        return weights

    def _wait(self, link: Link, tag: str) -> torch.Tensor:
        ends = partial(self._setup.supervisor.waits, ENDS_PULL)
        return WatchedLink(link, self._setup.tuning.beat, self._meanwhile, ends).recv(tag)

    def _meanwhile(self) -> None:
        self._beat()
        self.serve()

    # -- to others

    def serve(self) -> None:
        """Sends layers that others ask for."""
        for link in self._links():
            while link.error is None and link.has("pull") and (found := link.take("pull")) is not None:
                self._send(link, int(text_of(found)))

    def _send(self, link: Link, layer: int) -> None:
        module = decoder_layers(self._setup.replica.model)[layer]
        named = (*module.named_parameters(), *module.named_buffers())
        tensors = {name: tensor.detach() for name, tensor in named}
        link.send(tensor_of(json.dumps([*tensors])), "layer", urgent=True)
        for tensor in tensors.values():
            link.send(tensor, "weights", check=True)
            self.sent += tensor.nbytes
            self._beat()


def reason_of(error: Exception) -> Reason:
    """Why layers could not be made ready, or brought home, as the supervisor is told."""
    if isinstance(error, WeightsFileChanged):
        return Reason.FILE_CHANGED
    return Reason.HOST_MEMORY if isinstance(error, DropRefused) else Reason.PAGES
