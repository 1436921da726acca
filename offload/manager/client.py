"""The contract between the manager and its clients: owners of pages that may be taken, and are restored
when there is room.

`Client` is what all have in common. Two kinds differ in who decides what goes. Of a `ModelClient`, the weights of a
managed model, the manager decides which stream, as layers must be spread evenly over an iteration (candidates.py). A
`PageClient` says itself what it offers, and in which order. There are two: a KV cache (kv_client.py), which also holds
cached prefixes and kept recurrent states, and the pages of batched requests (hooks/batching/pages.py).

Note [A new class of tensors]
    One file and one line. The file, in the folder of hooks/ that has the tensors, has a class that derives from
    `PageClient`, with a `name`, the time of its last use (`used`) and seven members. Its bytes lie in a `Range` of a
    group (`Device.group`, `Device.reserve`), which a `Mover` moves to a `Backing` and back (offload/residency). Its
    offers have the sources of KV, or name others (policy/reclaim_order.py). The line, in its constructor, is
    `self.number = manager.add_client(self)`; the client goes when it is collected. Where it is first used within a
    forward of a managed model it has that model's priority and floor (clients.py, Note [Whose pages]). Then, on
    the thread that uses it:

    1. It leases its group (`GroupLease`): the core takes nothing that another thread leases.
    2. At each use it calls `manager.taken_of(number)`, which also notes the use, and has its mover look for what was
       taken where that names offers.
    3. It asks `manager.restorable_pages(number)`, gives so many pieces pages (`Mover.own`), starts the copies
       (`fetch`) and has its stream wait (`arrive`). `Range.note_use` says which stream reads or writes.
    4. When what it offers has changed it calls `manager.client_changed(number)`.

    `OptimizerState` in tests/test_client_contract.py is such a class; the tests there run on all clients. For chaos to
    move its pages, too, it implements `KV` of ballonet/testing/chaos.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from ...allocator._native import Range
from ..policy.kv_pages import Way
from ..policy.plan import Plan
from ..policy.reclaim_order import PageSource
from ..record.record import Point
from .kv_read_plan import Streamed

KEYS_PER_CLIENT: Final = 2**20  # a key of the reclaim list is a client's number times this, and an index
OUTSIDE_LAYERS: Final = KEYS_PER_CLIENT - 1  # the index of what a model has outside of its layers
INDICES_PER_SPLIT: Final = 2**16  # offers have lower ones; a further candidate made of one has an index higher by this


class Client(Protocol):
    """Properties are read under the manager's lock and must not wait. Methods may be called on any thread, without
    that lock where their docstring says nothing else."""

    @property
    def name(self) -> str: ...
    @property
    def running(self) -> bool:
        """Does any thread use it now, under a lease?"""

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """(group, parts) of a layer or an offer for `Device.publish`; None where it cannot be taken any more, or not
        yet. A part is (range, first piece, pieces, range of the backing or None, first piece there, [])."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages of a client that may be taken together. `index`: its number in the client, below `INDICES_PER_SPLIT`;
    `pages`: of the device, that it frees; `clean`: its backing has the bytes, so that nothing is copied when it is
    taken; `readers`: layers that read each of its pages in an iteration; `divisible`: any number of them may be taken;
    `resting`: nobody reads them for now, though others of the client's. `in_use`, `idle`: its source while its client
    is in use, and while it is not."""

    index: int
    pages: int
    clean: bool
    readers: int = 1
    divisible: bool = False
    resting: bool = False
    in_use: PageSource = PageSource.RUNNING_KV
    idle: PageSource = PageSource.IDLE_KV


class IterationTimes(Protocol):
    """Seconds of iterations of a model with every layer resident; None where nobody knows."""

    @property
    def entering(self) -> float:
        """Seconds that the host takes for each layer that streams, 0 where nobody knows."""

    def seconds(self, point: Point) -> float | None:
        """Returns what such an iteration takes at most."""

    def typical(self, point: Point) -> float | None:
        """Returns what such an iteration takes as a rule."""


class ModelClient(Client, Protocol):
    """The weights of a managed model. `entry` is called on threads that run a model."""

    @property
    def plan(self) -> Plan:
        """What streams, as it was arranged last; `pages` of what may stream of each layer, 0 where it cannot. Layers
        that the core took since count as resident."""

    @property
    def interval(self) -> int | Literal["auto"] | None: ...
    @property
    def tpot_slo(self) -> float | None:
        """Seconds that a decode step may take."""

    @property
    def ttft_slo(self) -> float | None:
        """Seconds that a prefill may take."""

    @property
    def others_wait(self) -> bool:
        """Do requests wait for the end of the next iteration? Then an SLO says what may be lent, and not what is to be:
        while a batch takes longer than it must, those wait for longer."""

    @property
    def waited(self) -> float:
        """Seconds that its iterations have waited for copies, as measured, since it was arranged last."""

    @property
    def copied(self) -> float:
        """Seconds that the link took to copy layers in these iterations, whether anybody waited for it or not."""

    @property
    def priority(self) -> int:
        """The priority of the model: those with the lowest give first."""

    @property
    def floor(self) -> int:
        """Device pages that its weights and caches keep."""

    @property
    def timings(self) -> IterationTimes:
        """What its iterations take."""

    def outside(self) -> int:
        """Returns the device pages of its weights outside of layers, which may go while it is idle, all at once
        (`OUTSIDE_LAYERS`); 0 where they have gone, or must stay. Called under the manager's lock; must not wait."""

    def wanted_until(self) -> float | None:
        """Until when requests need it, on the manager's clock: infinity while whoever schedules them has some, else
        when the last one ended; None where nobody schedules any."""

    def give_up(self, pages: int) -> int:
        """Up to so many device pages of prefixes that are kept for its prompts and that nobody uses go back, or a few
        more, after their keys; how many. Called without the manager's lock, on any thread. DriverError."""


class PageClient(ABC):
    """Pages that are offered one by one. The manager refers to it weakly, and reads its properties and `offers` with
    its lock: no lock may be taken for them that is held while the manager is called.

    How its numbers of pages nest: `pages` are `device_pages` and `displaced`; of `displaced`, `read_displaced` are read
    by the next iteration.
    """

    name: str
    model_name = ""  # of the model that it belongs to, for readers; "" where nobody knows, or `name` has it
    used: float  # when it was used last, by the manager's clock
    grows_by = 1  # pages: one for each of its ranges
    only_cached = False  # is it only there in case that a prompt begins with its tokens? Then it is idle at once

    @property
    @abstractmethod
    def running(self) -> bool:
        """Does any thread use it now, under a lease?"""

    @abstractmethod
    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """Returns what `Client.entry` does, of an offer."""

    @abstractmethod
    def offers(self) -> Sequence[Offer]:
        """Returns what may be taken, in the order of taking. A few: the list is made anew whenever one changes."""

    @property
    @abstractmethod
    def pages(self) -> int:
        """Pages under its bytes, wherever they are, and those that it is about to request."""

    @property
    @abstractmethod
    def device_pages(self) -> int:
        """Device pages that it has."""

    @property
    @abstractmethod
    def displaced(self) -> int:
        """Pages that lie on the peer or the host and would be on the device if there were room, as far as known."""

    @property
    @abstractmethod
    def ranges(self) -> list[tuple[str, Range]]:
        """The ranges that its pages lie in, with what is in each, for readers. Asked without the manager's lock, on
        any thread."""

    @property
    def read_displaced(self) -> int:
        """Displaced pages that its next iteration reads."""
        return self.displaced

    @property
    def resting(self) -> int:
        """Pages on the device that nobody reads for now, though others of the client's."""
        return 0

    @property
    def peer_pages(self) -> int:
        """Pages of the peer that could go to the host."""
        return 0

    @property
    def leaving_peer(self) -> int:
        """Pages that are on their way from the peer to the host."""
        return 0

    @property
    def streamed(self) -> Streamed:
        """How displaced pages are read: by default in place."""
        return Streamed(Way.ZERO_COPY if self.displaced else Way.RESIDENT, self.displaced, 0, 0, 0, 0.0)

    def give_slots(self) -> None:  # noqa: B027
        """Gives back slots that it is read through, as nobody has used it for a while and pages are short. Does nothing
        while anyone leases it. Returns at once; called on any thread."""

    def retreat(self) -> int:
        """All its pages leave the device for the host, as its model sleeps; returns how many stay. Nothing moves where
        a thread uses it. PoolExhausted where the host has too few; DriverError."""
        return self.device_pages

    def write_behind(self, pages: int) -> None:  # noqa: B027
        """Starts to copy up to so many pages that are offered and not clean, in their order, to the host, and looks
        what has become of those before. Returns at once; `client_changed` when they are clean. While pages are short it
        is called in each iteration of any model, also with 0."""

    def demote(self, pages: int) -> None:  # noqa: B027
        """Starts to copy up to so many pages from the peer to the host, the coldest first. Returns at once."""
