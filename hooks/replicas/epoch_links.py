"""The links of one member: of the epoch in force, and of one that is prepared beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ...offload.policy.tuning import DEFAULT, Replicas
from .bell import Bell
from .epoch import Epoch, Fence
from .errors import LinkError, NoAnswer, StaleEpoch
from .link import Link
from .pair import Connect
from .sending import Heard, State

Connects = Callable[[int, int], Connect]  # (epoch, peer) -> what makes the link


class EpochLinks:
    """All links that one member has in an epoch, by peer. They are formed at once, each in its own thread."""

    def __init__(
        self,
        epoch: Epoch,
        me: int,
        connects: Connects,
        bell: Bell,
        heard: Heard,
        device: torch.device,
        tuning: Replicas,
    ) -> None:
        """Begins to form them, and returns."""
        self.epoch = epoch
        self._bell = bell
        self.by_peer = {
            peer: Link(
                connects(epoch.number, peer), epoch.number, peer, bell, device=device, heard=heard, tuning=tuning
            )
            for peer in epoch.peers(me)
        }

    @property
    def formed(self) -> bool:
        """Whether all are open."""
        return all(link.state is State.OPEN for link in self.by_peer.values())

    @property
    def error(self) -> LinkError | None:
        """Why the first of them is lost or closed; None while none is."""
        return next((link.error for link in self.by_peer.values() if link.error is not None), None)

    def wait(self, timeout: float) -> None:
        """Returns when all are open. LinkError; NoAnswer after `timeout` seconds."""

        def look() -> bool | None:
            if (error := self.error) is not None:
                raise type(error)(error.epoch, error.peer, error.reason)
            return True if self.formed else None

        if self._bell.wait(look, timeout) is None:
            raise NoAnswer(f"the links of epoch {self.epoch.number}", timeout)

    def close(self) -> None:
        """Ends them; see `Link.close`. All are told first, so that waiting for one is waiting for all."""
        for link in self.by_peer.values():
            link.begin_close()
        for link in self.by_peer.values():
            link.close()


class Links:
    """What a member's main loop has of links. To be closed."""

    def __init__(
        self,
        me: int,
        connects: Connects,
        bell: Bell,
        fence: Fence,
        *,
        heard: Heard,
        device: torch.device | None = None,
        tuning: Replicas = DEFAULT.replicas,
    ) -> None:
        """`fence`: advanced as an epoch is committed. `heard`: of all links."""
        self.current: EpochLinks | None = None
        self.prepared: EpochLinks | None = None
        self._me = me
        self._connects = connects
        self._bell = bell
        self._fence = fence
        self._heard = heard
        self._device = device or torch.device("cpu")
        self._tuning = tuning
        self._closing: list[threading.Thread] = []

    def prepare(self, epoch: Epoch) -> EpochLinks:
        """Begins to form the links of an epoch; the current ones go on. One that was prepared before is discarded.
        StaleEpoch: it is not after the epoch in force."""
        if epoch.number <= self._fence.now:
            raise StaleEpoch(epoch.number, self._fence.now)
        if self.prepared is not None:
            self.discard(self.prepared.epoch.number)
        self.prepared = EpochLinks(epoch, self._me, self._connects, self._bell, self._heard, self._device, self._tuning)
        return self.prepared

    def commit(self, number: int) -> EpochLinks:
        """What was prepared is in force, and the links before are closed, in a thread: an end that is stopped does not
        hold up this one. StaleEpoch: another epoch is prepared, or none."""
        prepared = self.prepared
        if prepared is None or prepared.epoch.number != number:
            raise StaleEpoch(number, self._fence.now)
        self._fence.advance(number)
        before, self.current, self.prepared = self.current, prepared, None
        if before is not None:
            self._close_later(before)
        return prepared

    def discard(self, number: int) -> None:
        """Closes what was prepared, in a thread; nothing has changed. Nothing if it is not what is prepared."""
        if self.prepared is not None and self.prepared.epoch.number == number:
            prepared, self.prepared = self.prepared, None
            self._close_later(prepared)

    def close(self) -> None:
        """Ends all links. Idempotent."""
        for links in (self.current, self.prepared):
            if links is not None:
                links.close()
        self.current = self.prepared = None
        for thread in self._closing:
            thread.join()
        self._closing.clear()

    def _close_later(self, links: EpochLinks) -> None:
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        name = f"ballonet links of epoch {links.epoch.number} end"
        thread = threading.Thread(target=links.close, name=name, daemon=True)
        thread.start()
        self._closing.append(thread)
