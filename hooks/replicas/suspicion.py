"""A lost link, told to all: who waits for a third party hears that it is gone, though its own links are good.

Note [Told by whoever hears it]
    Who loses a link writes `suspect/E` in the store, so that who looks later finds it, and posts to every member of the
    epoch and to the supervisor itself; this does not wait for the supervisor's loop. Several may tell the same. What
    becomes of it the supervisor decides: both ends of a link may be alive.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from .epoch import Epoch
from .errors import SupervisorLost
from .link import Link
from .mailbox import SUPERVISOR, Mailbox
from .pair import forget_link
from .store import Store

SUSPECT: Final = "suspect"


def tell(store: Store, mailbox: Mailbox, epoch: Epoch, link: Link) -> None:
    """Posts that a link is lost, in the link's thread; `body` has `peer` and `reason`. Nothing once the store is gone:
    then the mailbox says so."""
    error = link.error
    reason = "" if error is None else error.reason
    with suppress(SupervisorLost):
        store.add(_key(epoch.number))
        for member in (SUPERVISOR, *epoch.members):
            if member not in (mailbox.me, link.peer):
                mailbox.post(member, SUSPECT, epoch.number, peer=link.peer, reason=reason)


def is_suspect(store: Store, epoch: int) -> bool:
    """Whether somebody has lost a link of this epoch. SupervisorLost."""
    return store.has(_key(epoch))


def forget_epoch(store: Store, epoch: Epoch) -> None:
    """Deletes what an epoch left in the store, by the supervisor, once all have committed a later one, or discarded it.
    SupervisorLost."""
    for one, other in epoch.links:
        forget_link(store, epoch.number, one, other)
    store.delete(_key(epoch.number))


def _key(epoch: int) -> str:
    return f"{SUSPECT}/{epoch}"
