"""The contract between the governor and its clients: whoever has extents (pages that come and go together) that may be
taken, and are restored when there is room.

`Client` is what all have in common. Two kinds differ in who decides what goes. Of a `ModelClient`, the layers of a
managed model, the governor decides which stream, as layers must be spread evenly over an iteration (candidates.py). A
`PageClient` says itself what it offers, and in which order: a KV cache, in use or kept for prompts (kv_client.py), and
the recurrent states that are kept (hooks/prefix/state_pages.py). A new class of tensors is one more `PageClient`: a
file that implements it, and a call of `Governor.add_client` where one is made. tests/test_client_contract.py runs on
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from ...allocator._native import Range
from ..policy.plan import Plan
from ..record.record import Point
from .kv_read_plan import Streamed

LAYERS: Final = 2**20  # a key of the reclaim list is a client's number times this, and an index
SPLIT: Final = 2**16  # indices of offers are below; each further candidate made of one has an index higher by this


class Client(Protocol):
    """All that is read here is answered at once: the governor holds its lock. What is called may be called on any
    thread, and where nothing else is said without that lock."""

    @property
    def name(self) -> str: ...
    @property
    def running(self) -> bool:
        """Does any thread use it now, under a lease?"""

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """(group, parts) of a layer or an offer for `Device.publish`; None where it cannot be taken any more, or not
        yet."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages of a client that may be taken together. `index`: its number in the client, below `SPLIT`; `pages`: of
    the device, that it frees; `clean`: its backing has the bytes, so that nothing is copied when it is taken;
    `readers`: layers that read each of its pages; `divisible`: any number of them may be taken; `resting`: nobody
    reads them for now, though others of the client's."""

    index: int
    pages: int
    clean: bool
    readers: int = 1
    divisible: bool = False
    resting: bool = False


class IterationTimes(Protocol):
    """Seconds of iterations of a model with every layer resident; None where nobody knows."""

    def seconds(self, point: Point) -> float | None:
        """Returns what such an iteration takes at most."""

    def typical(self, point: Point) -> float | None:
        """Returns what such an iteration takes as a rule."""


class ModelClient(Client, Protocol):
    """The layers of a managed model. `entry` is called on threads that run a model."""

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
    def priority(self) -> int:
        """The priority of the model: those with the lowest give first."""

    @property
    def floor(self) -> int:
        """Device pages that its weights and caches keep."""

    @property
    def timings(self) -> IterationTimes:
        """What its iterations take."""

    def wanted_until(self) -> float | None:
        """Until when requests need it, on the governor's clock: infinity while whoever schedules them has some, else
        when the last one ended; None where nobody schedules any."""

    def give_up(self, pages: int) -> int:
        """Up to so many device pages of prefixes that are kept for its prompts and that nobody uses go back, or a few
        more, after their keys; how many. Called without the governor's lock, on any thread. DriverError."""


class PageClient(Client, Protocol):
    """Pages that are offered one by one. The governor refers to it weakly, and calls what is read here with its lock:
    no lock may be taken for it that is held while the governor is called."""

    @property
    def whose(self) -> str:
        """The name of its model, for readers; "" where nobody knows, or its own name has it."""

    @property
    def used(self) -> float:
        """When tokens were appended last, by the governor's clock."""

    @property
    def displaced(self) -> int:
        """Pages that lie on the peer or the host and would be on the device if there were room."""

    @property
    def read_away(self) -> int:
        """The pages of these that its next iteration reads."""

    @property
    def near(self) -> int:
        """The pages of `displaced` that lie on the peer."""

    @property
    def on_peer(self) -> int:
        """Pages of the peer that could go to the host."""

    @property
    def leaving(self) -> int:
        """The pages that are on their way there."""

    @property
    def held(self) -> int:
        """Pages under its tokens, wherever they are, and those that it is about to have beside them."""

    @property
    def here(self) -> int:
        """The device pages that it has."""

    @property
    def ranges(self) -> list[tuple[str, Range]]:
        """The ranges that its pages lie in, with what is in each, for readers. Asked without the governor's lock, on
        any thread."""

    @property
    def block(self) -> int:
        """Pages that it grows by: one for each of its ranges."""

    @property
    def kept(self) -> bool:
        """Is it only there in case that a prompt begins with its tokens?"""

    @property
    def streamed(self) -> Streamed:
        """How what is displaced is read."""

    def offers(self) -> Sequence[Offer]:
        """What may be taken, in the order of taking. A few: the list is made anew whenever one of them changes."""

    def give_slots(self) -> None:
        """Nobody has used it for a while, and pages are short: slots that it is read through go back. Does nothing
        while anyone leases it. Returns at once; may be called on any thread."""

    def write_behind(self, pages: int) -> None:
        """Starts to copy up to so many pages that are offered and not clean, in their order, to the host, and looks
        what has become of those before. Returns at once; `Governor.client_changed` when they are clean. While pages are
        short it is called in each iteration of any model, also with 0."""

    def demote(self, pages: int) -> None:
        """Starts to copy up to so many pages from the peer to the host, the coldest first. Returns at once."""
