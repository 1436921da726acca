"""The native core: driver, pages, ranges and the caching allocator. Sizes are bytes, counts are pages, times are ns.

Errors are the classes of `ballonet.allocator.errors`; `PoolExhausted` is what an allocation that does not fit raises
here (the Python layers turn it into `torch.OutOfMemoryError`).
"""

from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, Literal, Protocol, TypeVar

from typing_extensions import Buffer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Owner = Literal["weights", "activations", "kv"]
LeadsTo = Literal["none", "device", "host", "peer", "alias", "pending_free", "kept"]
Place = Literal["device", "host", "peer"]

Source = tuple[int, int, int]
"""(offset in bytes from the part's start, address, nbytes)"""
Part = tuple[Range, int, int, Range | None, int, list[Source]]
"""(home, first, count, twin, twin_first, sources); twin: the backing range, None for a buffer that others lead to"""
Entry = tuple[int, Group, list[Part]]
"""(key, group of the homes, parts)"""

Block = tuple[int, int, int, str]
"""(address, nbytes, requested, "allocated" | "pending" | "free")"""
Segment = tuple[int, int, tuple[int, int], bool, list[Block], str, int]
"""(address, nbytes, pool, small, blocks, owner, stream); owner: as in `Stats.pages`, or "spilled" (host pages)"""

def probe(library: str, ordinal: int) -> dict[str, Any]:
    """Returns the driver's facts about device `ordinal`; `library`: of the driver. Creates no context.

    Keys: library, kind ("cuda" | "standin"), driver_version (int), devices (int), name, total_memory,
    virtual_memory (bool), host_pages (bool), posix_handles (bool), context_active (bool), peers (the other devices
    whose memory it can reach). Raises DriverUnavailable where it cannot be loaded, or does not start (no device, or one
    that cannot be used).
    """

class Checkpoint:
    """The live blocks of a pool, from `Device.checkpoint`."""

class Device:
    """One device: its driver, its pools of device, host and peer pages, and the heap under torch."""

    def __init__(
        self,
        *,
        library: str,
        ordinal: int,
        page_size: int,
        budget: int,
        host_budget: int,
        peer: int | None = None,
        peer_budget: int = 0,
        link_bandwidth: int = 0,
        link_latency_ns: int = 0,
        peer_bandwidth: int = 0,
        spill: bool = False,
        host_pages: bool = True,
        faults: list[tuple[str, int]] = ...,
        unbacked: int = 0,
    ) -> None:
        """`unbacked`: bytes of a stand-in whose device pages take no memory before they are written to; 0: all the
        memory of this machine, which its pages take at once."""
    @property
    def kind(self) -> Literal["cuda", "standin"]: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def peer(self) -> int | None:
        """The device that pages of the peer are on: this one itself for a second pool, None where there is no peer."""
    @property
    def peer_refused(self) -> str:
        """Why there is no peer although one was requested; else empty."""
    @property
    def host_pages(self) -> bool:
        """Can host pages be mapped in the place of device pages? Tried with a page when this was opened."""
    @property
    def host_refused(self) -> str:
        """Why host pages cannot be mapped; else empty."""
    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device as its driver counts them."""
    def set_budget(self, nbytes: int, wait_ns: int = 0) -> None:
        """Returns when no more device pages exist than that: free and idle ones go back to the driver, then those of
        published entries, where another thread leases them once it has obeyed or left. Nothing is created above it
        meanwhile. BudgetInUse where not all of that would do, with nothing changed, and after `wait_ns`, or once
        another budget is asked for; DriverError; what a signal's handler raises. Then the budget is what it was."""
    @staticmethod
    def on_spill(tell: Callable[[], object]) -> None:
        """Called, once, on the main thread when the next block was spilled, as soon as that thread runs Python."""
    def events(self) -> list[tuple[int, str, int, int, int, int]]:
        """Drains (time_ns when it began, kind, pages, key, thread, duration_ns), in the order in which they ended.

        `kind`: "inflate", "deflate", "take", "yield", "request", "spill", "unspill", "refuse", "budget" (its pages),
        "budget refused".
        `key`: of the entry for "take" and "yield", the pages of the budget before for "budget" and, where it had been
        lowered, "budget refused", else -1. `thread`: `threading.get_ident()`. CLOCK_MONOTONIC. Where more than 8192
        came in between, the oldest are gone.
        """
    def snapshot(self) -> dict[str, Any]:
        """Consistent numbers taken under the locks.

        Keys: page_size, budget, created, pages {free, weights, activations, kv, pending_free}, host_pages, host_free
        (of these), spilled (those that blocks of the heap lie on), host_budget, peer ("", "second pool", "device N"),
        peer_pages, peer_free, peer_budget, copied {weights_h2d, weights_d2h, kv_h2d, kv_d2h, kv_p2d, kv_d2p, kv_p2h: p
        is the peer}, driver_calls {function: count}, background_calls (of these, the mapper's thread's), faults,
        reclaimed (device pages that entries gave so far), kept and ahead (of the free device pages: still mapped, in
        cached ranges and ahead of their use), driver_ns {callers, background} (spent in calls that change page tables),
        physical_peak (bytes), heap {live, live_peak, requested, requested_peak, allocated_total, freed_total, reserved,
        cached, blocks, allocations, frees, hits}.
        """
    def memory_stats(self) -> dict[str, Any]:
        """Returns the statistics of `torch.cuda.memory_stats_as_nested_dict`."""
    def memory_info(self) -> tuple[int, int]:
        """Returns (free, total) bytes for `torch.cuda.mem_get_info`: free are free pages, and those that budget and
        device still allow."""
    def reset_peaks(self) -> None: ...
    def reset_accumulated(self) -> None:
        """Resets the totals of `memory_stats`."""
    @property
    def fraction(self) -> float:
        """The share of the device's memory beyond which no page is created, whatever the budget is. Lowered, it takes
        nothing away: what exists above it goes back to the driver as it is freed."""
    @fraction.setter
    def fraction(self, value: float) -> None: ...
    def segments(self) -> list[Segment]:
        """Every stretch of addresses with pages of the heap or of ranges behind it, and from address 0 on the pages
        that are free and those that retire. All at one moment: but for what is spilled, they are the pages that exist.
        """
    def checkpoint(self, pool: tuple[int, int]) -> Checkpoint:
        """Saves which blocks of the pool live. BallonetError where there is no such pool."""
    def restore_checkpoint(self, state: Checkpoint) -> tuple[list[int], list[int]]:
        """Frees the live blocks of the pool and hands out those of the checkpoint, at the same addresses. Returns
        (freed, created)."""
    def trim(self) -> int:
        """Gives pages wholly inside free blocks back to the pool, and the free pages of both pools, of the device and
        the host, back to the driver; returns the bytes of the former. Waits for retirements."""
    def reap(self, wait: bool = False) -> int:
        """Completes retirements whose streams have passed, as the background does by itself; with `wait` all of them,
        and the requests of `Range.map_ahead`. Returns the pages freed by it."""
    def driver_ns(self) -> int:
        """ns that the calling thread spent so far in driver calls that change page tables, of all devices."""
    def allocate(self, nbytes: int, stream: int = 0) -> int: ...
    def deallocate(self, address: int) -> None: ...
    def record_stream(self, address: int, stream: int) -> None: ...
    def begin_pool(self, pool: tuple[int, int], streams: list[int] | None = None) -> None:
        """Has allocations on these streams (None: on any) come from `pool`, which keeps its pages until `release_pool`
        was called as often as this. BallonetError where it is being filled already."""
    def end_pool(self, pool: tuple[int, int]) -> None: ...
    def release_pool(self, pool: tuple[int, int]) -> None: ...
    def block_size(self, address: int) -> int:
        """Bytes of the live block at `address`, 0 where there is none."""
    def group(self) -> Group: ...
    def reserve(
        self,
        nbytes: int,
        owner: Owner,
        group: Group,
        auto_retire: bool = False,
        *,
        expected: int = 0,
        reuse: bool = True,
        more: int = 0,
        keeps: bool = False,
    ) -> Range:
        """A range of ceil(nbytes / page) pieces, none of them backed. `auto_retire`: a piece is retired when the last
        tensor over it is gone.

        Once a range of "kv" is closed and its streams have passed, its pages are free and stay mapped: it is a cached
        range (eLLM §4.2.2, slot). With `reuse` a range of "kv" gets the addresses of the cached one that fits best, the
        smallest with `expected` bytes mapped, and `map` finds these pieces "kept": it claims them without a driver
        call. Other needs for pages take them out of cached ranges, the oldest first, before new ones are created.
        `reuse=False` is for a range that will have host pages.

        A range that `keeps` has its retired pages so while it is open: they are free, and still mapped. They go to
        other needs once no new page can be created, before pages in use are taken.

        `more` ranges of "kv" of this size and group will follow, each mapped as far as this one is by its first `map`:
        the background makes cached ranges for them, within the limit of `map_ahead`. Once they have come, pieces by
        which one grows are mapped ahead in the next."""
    def note_stream(self, stream: int) -> None:
        """Notes that a stream may touch pages: retirements wait for it."""
    def note_use(self, address: int, nbytes: int, stream: int, write: bool) -> None:
        """Tells the stand-in's order checker who uses what; nothing on CUDA."""
    def synchronize(self) -> None: ...
    def stop_background(self) -> None:
        """Ends the thread that completes retirements and maps ahead. From now on nothing is mapped ahead, and pages
        that are retired are free at once where their streams have passed: what is free at a moment follows from what
        was done before, however fast the machine is. Idempotent."""
    def timeline(self) -> list[tuple[int, int, int, int, int, int]]:
        """Drains (time_ns, free, weights, activations, kv, pending_free), one row per change; CLOCK_MONOTONIC."""
    def publish(self, entries: list[Entry], limits: dict[int, int] = ...) -> None:
        """Replaces the reclaim list: what is taken, in this order, when device pages run out.

        That is in `map`, `own`, an allocation or a lower budget, on any thread, once free blocks are trimmed and
        retirements reaped. An entry is taken as a whole, but for those in `limits` (key -> device pages): those give as
        many pieces as are needed, up to the limit, from their parts in turns, the lowest pieces first; a piece that is
        not what it was is passed over, and the others stay. They have neither sources nor buffers.

        The bytes of pieces [first, first + count) of each `home` go to [twin_first, ...) of its `twin`, the home's
        addresses lead there afterwards (`Range.alias`), and its device pages are free. Pieces of `twin` that are backed
        hold the bytes already, and nothing is copied; others are backed with host pages, those of "kv" with the peer's
        as far as it has any, and filled from `sources`, or from the home where there are none (counted in `copied`). A
        source is `HostMemory` or bytes of the home's part; bytes that no source covers are undefined.

        Where `twin` is None the pages are those of a buffer, which go: homes of the other parts may lead there
        (`Range.alias`), and lead to their backing ranges afterwards, which hold the bytes already; those of the buffer
        itself lead nowhere. An entry that does not name all that leads to its buffer is passed over.

        An entry is passed over, and stays, while another thread holds a lease on its group, the host has too few pages,
        others lead to its pages, or a graph is being captured. A failure of the driver leaves it as it was. A request
        that all entries together could not meet takes none.

        An entry describes its pieces as they are now. Once any of them is mapped, led elsewhere or retired, a range is
        closed or a source unregistered, the entry is void and leaves the list: what is void now does not enter it. So
        code that changes pieces withdraws the entry first, or publishes anew afterwards. BallonetError, with the old
        list in place, where an entry makes no sense: two of one key, pieces that are named twice or lie outside their
        range, a home of another group.
        """
    def withdraw(self, keys: list[int]) -> None:
        """Removes entries: they are not taken once this returns. Waits for one that is being taken. Unknown keys are
        ignored."""
    @property
    def published(self) -> list[int]:
        """Keys of the entries that may still be taken, in their order."""
    def taken(self) -> list[tuple[int, int, int]]:
        """Drains (time_ns, key, device pages freed), one row per entry taken; CLOCK_MONOTONIC. Where more than 4096
        were taken in between, the oldest are gone."""
    @property
    def page_request(self) -> int:
        """Device pages that are missing for a request which failed, and that only entries leased by another thread can
        give; 0 once they can be had otherwise."""
    def yield_pages(self) -> int:
        """Takes for the request, in order, the entries that this thread may take now, between two layers; returns the
        pages.

        What yet other threads lease stays requested. DriverError where nothing could be taken for that.
        """
    def hear_shortages(self, most: int, patience_ns: int) -> None:
        """Has threads that lack device pages ask the caller of `shortage`, and wait for its answer so long, before they
        take entries. The budget may become `most` pages; 0: ends that."""
    def lacks(self, pages: int) -> None:
        """Tells the caller of `shortage` that so many device pages more could be used. Waits for no answer."""
    def shortage(self, timeout_ns: int) -> tuple[int, bool]:
        """Waits until device pages are lacking, or more is wanted than the budget may become, so long at most; returns
        how many lack, 0 for none, and whether nothing else helps. For one thread, which calls `answer_shortage` then,
        after `hear_shortages` if the budget may become another."""
    def answer_shortage(self, raised: bool) -> None:
        """Answers all that `shortage` has returned. `raised`: is the budget larger?"""
    def take(self, keys: list[int], pages: int | None = None) -> int:
        """Takes those of these entries, in the order of the list, that this thread may take now, until there are so
        many `pages`; returns the device pages freed. The others stay. DriverError where nothing could be taken for
        that."""
    @property
    def reclaimed(self) -> int:
        """Device pages that entries have given so far."""
    @property
    def available(self) -> int:
        """Device pages that can be had without taking any: free ones, and those that the budget allows to create."""
    @property
    def idle(self) -> int:
        """Device pages of activations that no live block lies on: a range that finds none available gets them before
        anything is taken."""
    def check(self) -> None:
        """Verifies every invariant the core can see; raises InvariantBroken."""
    def bind(self) -> None:
        """Makes this the device behind torch's entry points (one per ordinal)."""
    def unbind(self) -> None: ...
    def close(self) -> None:
        """Releases everything; raises BallonetError while blocks are live or ranges open."""

class Group:
    """Ranges that are leased together: the weights of one model, one KV cache."""

    def enter(self) -> None:
        """This thread's forward uses the group's pages from here on (counts)."""
    def leave(self) -> None: ...
    @property
    def leases(self) -> int: ...
    @property
    def unpinned(self) -> int:
        """How many tensors over ranges of the group are gone so far."""

class Lease:
    """The groups that a thread has entered; they are left when this is closed, or collected, on any thread."""

    def __init__(self) -> None: ...
    def enter(self, group: Group) -> None:
        """Enters the groups on the calling thread. Idempotent."""
    def close(self) -> None:
        """Leaves all groups. They may be entered again."""

class Range:
    """Reserved addresses in page-sized pieces. Collecting it closes it, after every tensor made from it is gone."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    @property
    def backed(self) -> int:
        """Pieces that lead to a page, those that are pending free not counted."""
    @property
    def owner(self) -> Owner: ...
    def map(self, first: int, count: int) -> None:
        """Backs `count` unbacked (or kept, or pending free) pieces with device pages, all or none. PoolExhausted,
        DriverError."""
    def map_ahead(self, first: int, count: int) -> None:
        """Asks for pieces of a range of "kv" or "weights" to be mapped in the background, in this order, so that `map`
        finds them "kept" (eLLM §5.1). Returns at once.

        Pages that are free or may be created are used, and none are taken from others: where there are none the rest is
        forgotten, as it is at 50 MB (at least a page) of unclaimed pages in all. They are free for whoever needs pages
        and can have no others, and `retire` gives them up first. BallonetError for pieces outside the range."""
    def map_host(self, first: int, count: int) -> None:
        """Backs pieces as `map`, with host pages. PoolExhausted also where the device has none at all."""
    def map_peer(self, first: int, count: int) -> None:
        """Backs pieces as `map`, with pages of the peer. BallonetError where there is no peer."""
    def take_over(self, first: int, spare: Range, spare_first: int, count: int, range: Range) -> bool:
        """The pages of `spare`, at [spare_first, ...), come to these pieces, whose own become free, and the same pieces
        of `home` lead to them where they led to those. The bytes are the same, so no entry of the reclaim list is void.

        False as for `alias`, and where others lead to these pages. BallonetError where a side has no page of its own.
        """
    def adopt(self, first: int, spare: Range, spare_first: int, count: int) -> bool:
        """Gives these pieces, which lead to another range, the device pages of `spare` at [spare_first, ...) as their
        own: what can be read there must be the same. `spare` has them no more.

        False as for `alias`, and where tensors show the pages at the addresses of `spare`. BallonetError where a piece
        leads nowhere, or where a page is not of the device."""
    def place(self, piece: int) -> Literal["", "device", "host", "peer"]:
        """The place of the page that the piece leads to; "" where there is none."""
    def alias(self, first: int, source: Range, source_first: int, count: int) -> bool:
        """Leads pieces to the pages of `source`, of the device or the host, whatever they led to before; pages of their
        own become free.

        Tensors may lie there: they show what `source` holds. False, and nothing changed, where pieces led elsewhere and
        another thread holds a lease on the group or a stream is being captured.
        """
    def own(self, first: int, count: int) -> bool:
        """Gives aliased pieces new device pages, whose contents are undefined. PoolExhausted; False as for `alias`."""
    def retire(self, first: int, count: int) -> None:
        """Retires the pieces' pages, which are unmapped once every stream seen has passed; unbacked pieces are
        skipped."""
    def move(self, piece: int, to: Place) -> bool:
        """Copies the piece to another page and remaps it there, address unchanged.

        False, and nothing changed, where no page is free or another thread holds a lease on the group.
        """
    def drop_kept(self, piece: int) -> bool:
        """Takes a "kept" page from the piece, which leads nowhere then. False where there is none, or the driver
        refuses."""
    def leads_to(self, piece: int) -> LeadsTo: ...
    def runs(self, first: int, count: int) -> list[tuple[int, int, LeadsTo]]:
        """(first, count, leads to) of neighbours among `count` pieces from `first` on."""
    def page(self, piece: int) -> int:
        """Index of the backing page in its pool, -1 where there is none."""
    def tensor(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], code: int, bits: int) -> object:
        """A DLPack capsule (strides in elements) over the mapped bytes at `offset`; keeps the range alive.

        Raises BallonetError where any byte of it is not backed.
        """
    def window(self, offset: int, nbytes: int) -> object:
        """A DLPack capsule over `nbytes` bytes at `offset` as uint8, backed or not; keeps the range alive, and pins
        nothing: pieces under it are mapped and retired as if it were not there. Reading or writing where no page is
        ends the process, or on CUDA the context. Raises BallonetError where the range is smaller."""
    def note_use(self, stream: int, write: bool) -> None:
        """Calls `Device.note_use` for all backed pieces, on CUDA `Device.note_stream`."""
    def close(self) -> None:
        """Retires everything; the addresses are freed when the last tensor and the last retirement are gone."""
    @property
    def closed(self) -> bool: ...

class Transfer:
    """A stream of copies between host and device, carried out in the order of their submission."""

    def __init__(self, device: Device) -> None: ...
    def copy(self, parts: list[tuple[int, int, int]], *, after: int | None, owner: Owner, to: Place) -> Done:
        """Copies (to, from, nbytes) by address once what the stream `after` was given so far has passed; with None what
        every stream was given that was ever seen.

        Counted in `Stats.copied` for `owner`, by where the addresses lead; `to` says it of those that no range has.
        Raises BallonetError while `after` is being captured, DriverError.
        """

class Done:
    """The end of the copies of one call."""

    def before(self, stream: int) -> None:
        """Has `stream` wait for the copies. On the stand-in stream 0 is the calling thread."""
    def passed(self) -> bool: ...
    def wait(self) -> None:
        """Waits for the copies, on the host."""

class HostMemory:
    """Part of a buffer, registered with the device for reading: copies from it run at the speed of the link.

    A read-only buffer stays mapped for as long as this is open. Registering pins the pages of the machine under it;
    two of these must not share one. Collecting it closes it.
    """

    def __init__(self, device: Device, buffer: Buffer, offset: int, nbytes: int) -> None:
        """Raises BallonetError where the bytes are not in the buffer; DriverError where the driver does not support
        it, may not pin as much, or has registered some of it before."""
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None:
        """Unregisters, once the copies are done that were submitted. DriverError; it may be tried again."""
    @property
    def closed(self) -> bool: ...

class Section(Protocol[T_co]):
    """A section: `end` may be called again where it was interrupted, and after a `begin` that was not done."""

    def begin(self) -> T_co: ...
    def end(self, failed: bool, /) -> object: ...

class Guarded(Generic[T]):
    """A context manager whose `end` is done to its end, though Ctrl-C comes between any two lines of it, or of
    `begin`: what interrupted it is raised then."""

    def __init__(self, section: Section[T]) -> None: ...
    def __enter__(self) -> T: ...
    def __exit__(self, kind: object, error: object, trace: object, /) -> None: ...

def finish(steps: list[Callable[[], object]], *ignored: object) -> None:
    """Takes the steps out of the list and calls them in this order, again where one raised. What was raised first is
    raised once all are done. Nothing while Python itself ends."""

def first_argument(frame: FrameType) -> object:
    """Returns the first argument of a call, or that variable's present value; None where it has no argument. Unlike
    `frame.f_locals`, safe for a call that another thread is running."""

class AnyLock(Protocol):
    def acquire(self, blocking: bool = ..., /) -> bool: ...
    def release(self) -> None: ...

def if_free(lock: AnyLock, act: Callable[[], object]) -> bool:
    """Calls `act` with the lock, if that is free. Returns whether it was."""

def core_table() -> int:
    """Address of the `BallonetCore` table (entry.h) for the companion."""

def entry_points() -> dict[str, int]:
    """Addresses of the functions that torch's pluggable allocator calls: alloc, segment, free, record_stream, trim,
    begin_pool, end_pool, release_pool, memory_fraction and base_allocation."""

def replay(device: Device, ops: bytes, parts: int = 1) -> dict[str, Any]:
    """Runs a packed trace. Rows are little-endian (op: u8, pad: 7, id: u64, size: u64, stream: u64); op 1 = alloc, 2
    = free.

    Returns peak_live, peak_physical, driver_calls, ns_per_op, ops; physical: the most bytes that existed in each of
    `parts` equal parts of the operations, fewer where there are fewer of these.
    """
