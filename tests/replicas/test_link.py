"""Links between two ends in one process, over gloo, and over a pair that a test holds in its hand."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.errors import Interrupted, LinkClosed, LinkError, NoAnswer
from ballonet.hooks.replicas.link import HEADER_BYTES, Header, Link, LinkState
from ballonet.hooks.replicas.pair import GlooConnect, Store, TwoRanks
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

LONG = 120.0  # s, until a test is given up; nothing is said of how fast this machine is
EPOCHS = itertools.count(10, 10)
TUNING = ReplicaTuning(forming=LONG, linger=LONG)


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.host(timeout=LONG)


@pytest.fixture
def epoch() -> int:
    """An epoch that no other test has, nor the nine after it."""
    return next(EPOCHS)


def eventually(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"{what}: not within {LONG} s"
        time.sleep(0.005)


def both(store: Store, epoch: int) -> tuple[Link, Link]:
    """Both ends of a link, members 1 and 2."""
    ends = [
        Link(GlooConnect(store, epoch, me, peer, LONG), epoch, peer, Wakeup(), tuning=TUNING)
        for me, peer in ((1, 2), (2, 1))
    ]
    eventually(lambda: all(end.state is LinkState.OPEN for end in ends), "the link is formed")
    return ends[0], ends[1]


@contextmanager
def linked(store: Store, epoch: int) -> Iterator[tuple[Link, Link]]:
    ends = both(store, epoch)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8, torch.complex64]


def test_tensors_of_any_type_and_shape_arrive(store: Store, epoch: int) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(3, 4, 5) * 2).to(dtype) for dtype in DTYPES]
    tensors += [torch.empty(0, 7, dtype=torch.bfloat16), torch.tensor(3.5), torch.randn(6, 4).t(), torch.randn(2**20)]
    with linked(store, epoch) as (one, other):
        for number, tensor in enumerate(tensors):
            one.send(tensor, f"tensor {number}")
            other.send(tensor, "back", urgent=True)
        for number, tensor in enumerate(tensors):
            for received in (other.recv(f"tensor {number}", LONG), one.recv("back", LONG)):
                assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(received, tensor)


def test_a_tensor_may_be_written_to_once_it_is_sent(store: Store, epoch: int) -> None:
    with linked(store, epoch) as (one, other):
        tensor = torch.ones(2**18)
        for value in range(5):
            tensor.fill_(value)
            one.send(tensor, "state")
        assert [other.recv("state", LONG).unique().tolist() for _ in range(5)] == [[0], [1], [2], [3], [4]]


def test_tensor_that_cannot_be_sent_is_refused_at_once(store: Store, epoch: int) -> None:
    with linked(store, epoch) as (one, other):
        with pytest.raises(ValueError, match="a header has 256 bytes"):
            one.send(torch.ones(1), "x" * 250)
        with pytest.raises(ValueError, match="no plain bytes"):
            one.send(torch.ones(2, 2).to_sparse(), "sparse")
        with pytest.raises(ValueError, match="no plain bytes"):
            one.send(torch.ones(2, 2, device="meta"), "meta")
        one.send(torch.ones(2), "good")
        assert other.recv("good", LONG).tolist() == [1, 1]


def test_a_message_sent_before_the_link_is_formed_arrives(store: Store, epoch: int) -> None:
    one = Link(GlooConnect(store, epoch, 1, 2, LONG), epoch, 2, Wakeup(), tuning=TUNING)
    one.send(torch.ones(3), "early")
    assert one.state is LinkState.FORMING
    other = Link(GlooConnect(store, epoch, 2, 1, LONG), epoch, 1, Wakeup(), tuning=TUNING)
    assert other.recv("early", LONG).tolist() == [1, 1, 1]
    one.close()
    other.close()


def test_states_do_not_wait_behind_bulk(store: Store, epoch: int) -> None:
    """All of the bulk is queued first, and is on its way for longer than a state."""
    with linked(store, epoch) as (one, other):
        chunk = torch.randn(2**20)
        for number in range(24):
            one.send(chunk + number, "chunk")
        one.send(torch.ones(4), "state", urgent=True)
        other.recv("state", LONG)
        assert len(other._inbox["chunk"]) < 24
        for number in range(24):
            assert torch.equal(other.recv("chunk", LONG), chunk + number)


class Wire:
    """One group of a link between two ends of a test. Whatever a test wants may be done to what is sent."""

    def __init__(self, there: queue.Queue[torch.Tensor], back: queue.Queue[torch.Tensor]) -> None:
        self.there, self.back = there, back
        self.change: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        self.closed = threading.Event()

    @classmethod
    def pair(cls) -> tuple[Wire, Wire]:
        there: queue.Queue[torch.Tensor] = queue.Queue()
        back: queue.Queue[torch.Tensor] = queue.Queue()
        return cls(there, back), cls(back, there)

    direct = False

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("nothing comes to a device")

    def send(self, tensor: torch.Tensor, direct: bool = False) -> None:
        if self.closed.is_set():
            raise RuntimeError("closed")
        self.there.put(self.change(tensor))

    def recv(self, into: torch.Tensor, direct: bool = False) -> None:
        while not self.closed.is_set():
            try:
                into.copy_(self.back.get(timeout=0.01))
                return
            except queue.Empty:
                pass
        raise RuntimeError("Connection closed by peer\nadvice")

    def close(self) -> None:
        self.closed.set()


class Given:
    """Connects to wires that are there: of states, and of bulk."""

    def __init__(self, states: TwoRanks, bulk: TwoRanks | None = None) -> None:
        self.wires = states, bulk or Wire.pair()[0]

    def __call__(self) -> tuple[TwoRanks, ...]:
        return self.wires

    def cancel(self) -> None:
        pass

    def delete_keys(self) -> None:
        pass


BYE = Header("", "uint8", (), 0)


@contextmanager
def one_end() -> Iterator[tuple[Link, Wire]]:
    """A link of epoch 5 to member 2, and the wire at its other end."""
    here, there = Wire.pair()
    link = Link(Given(here), 5, 2, Wakeup(), tuning=replace(TUNING, linger=0.05))
    try:
        yield link, there
    finally:
        link.close()


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (torch.zeros(HEADER_BYTES, dtype=torch.uint8), "no header"),
        (torch.full((HEADER_BYTES,), 255, dtype=torch.uint8), "no header"),
        (Header("x", "float32", (3,), -1).pack(), "it is damaged"),
        (Header("x", "float33", (3,), 0).pack(), "it is damaged"),
        (Header("x", "float32", (3,), 0).pack(), "0 bytes are no float32 tensor of shape"),
    ],
)
def test_bytes_that_are_no_message_end_the_link(header: torch.Tensor, why: str) -> None:
    with one_end() as (link, there):
        there.send(header)
        with pytest.raises(LinkError, match=why):
            link.recv("x", LONG)
        assert link.state is LinkState.LOST


def test_tensor_that_comes_just_before_the_end_is_taken_before_it() -> None:
    """The message and the end come during a wait that has found nothing yet."""
    with one_end() as (link, there):
        eventually(lambda: link.state is LinkState.OPEN, "it is open")
        lock = link._lock

        class Comes:
            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()
                link._lock = lock
                there.send(Header("last", "uint8", (1,), 1).pack())
                there.send(torch.ones(1, dtype=torch.uint8))
                there.send(BYE.pack())
                eventually(lambda: link.error, "it is closed")

        link._lock = Comes()  # type: ignore[assignment]
        assert link.take("last") is None
        assert link.recv("last", LONG).tolist() == [1]
        with pytest.raises(LinkClosed):
            link.take("last")


def test_a_fault_ends_one_link_and_what_it_had_to_do() -> None:
    with one_end() as (link, there), one_end() as (bystander, across):
        link.send(torch.ones(1), "sent", urgent=True)
        there.back.get(timeout=LONG)
        there.send(Header("came", "uint8", (1,), 1).pack())
        there.send(torch.ones(1, dtype=torch.uint8))
        eventually(lambda: link.has("came"), "it came")
        link._pairs[0].close()
        eventually(lambda: link.state is LinkState.LOST, "it is lost")
        assert link.recv("came", LONG).tolist() == [1]  # what was here before stays
        with pytest.raises(LinkError, match=r"replica 2 in epoch 5 is lost: RuntimeError: Connection closed by peer\."):
            link.recv("never", LONG)
        with pytest.raises(LinkError):
            link.send(torch.ones(1), "after")
        across.send(Header("fine", "uint8", (0,), 0).pack())
        assert bystander.recv("fine", LONG).shape == (0,)


def test_wait_for_a_link_ends_by_the_control_plane_and_the_deadline() -> None:
    wakeup = Wakeup()
    here, _ = Wire.pair()
    link = Link(Given(here), 5, 2, wakeup, tuning=replace(TUNING, linger=0.05))
    with pytest.raises(NoAnswer, match="'state' of replica 2 did not come"):
        link.recv("state", timeout=0.01)
    news: list[str] = []

    def post() -> None:
        news.append("suspect")
        wakeup.notify()

    later = threading.Timer(0.05, post)
    later.start()
    with pytest.raises(Interrupted):
        link.recv("state", LONG, unless=lambda: bool(news))
    later.join()
    link.close()


def test_a_closed_end_closes_the_other_and_neither_is_lost(store: Store, epoch: int) -> None:
    one, other = both(store, epoch)
    one.close()
    eventually(lambda: other.state is LinkState.CLOSED, "the other end hears it")
    with pytest.raises(LinkClosed, match="the other end has closed it"):
        other.recv("state", LONG)
    with pytest.raises(LinkClosed, match="this end has closed it"):
        one.send(torch.ones(1), "state")
    other.close()
    one.close()
    assert [end.state for end in (one, other)] == [LinkState.CLOSED] * 2


def test_a_link_is_given_up_while_it_is_formed(store: Store, epoch: int) -> None:
    """An end that comes too late finds that the link was given up."""
    one = Link(GlooConnect(store, epoch, 1, 2, LONG), epoch, 2, Wakeup(), tuning=TUNING)
    one.close()
    assert one.finished
    late = Link(GlooConnect(store, epoch, 2, 1, LONG), epoch, 1, Wakeup(), tuning=TUNING)
    with pytest.raises(LinkError, match="given up"):
        late.recv("state", LONG)
    late.close()


def test_an_end_that_never_comes_is_an_error_and_not_a_wait_for_ever(store: Store, epoch: int) -> None:
    link = Link(GlooConnect(store, epoch, 1, 2, 0.05), epoch, 2, Wakeup(), tuning=TUNING)
    with pytest.raises(LinkError, match=r"could not be formed, NoAnswer"):
        link.recv("state", LONG)
    link.close()


def test_an_address_that_is_not_found_is_an_error_and_not_a_wait_for_ever() -> None:
    class Nowhere(Given):
        def __call__(self) -> TwoRanks:
            raise OSError("Name or service not known")

    link = Link(Nowhere(Wire.pair()[0]), 5, 2, Wakeup(), tuning=TUNING)
    with pytest.raises(LinkError, match=r"could not be formed, OSError: Name or"):
        link.recv("state", LONG)
    link.close()


def test_links_leave_nothing_behind(store: Store, epoch: int) -> None:
    def there() -> tuple[int, set[str], int]:
        gc.collect()
        threads = {thread.name for thread in threading.enumerate() if "link" in thread.name}
        return len(os.listdir("/proc/self/fd")), threads, store.keys()

    with linked(store, epoch) as (one, other):  # the thread that all links share is there from now on
        one.send(torch.ones(1), "any")
        other.recv("any", LONG)
    files, *before = there()
    for turn in range(1, 6):
        with linked(store, epoch + turn) as (one, other):
            one.send(torch.ones(100), "kv")
            other.recv("kv", LONG)
            if turn == 5:
                one._pairs[0].close()
                eventually(lambda: other.state is LinkState.LOST, "the other end hears it")
    eventually(lambda: there()[0] <= files, f"there were {files} open files")
    eventually(lambda: [*there()[1:]] == before, f"there was {before}, and is {there()}")


def test_a_bye_that_is_not_answered_does_not_hold_up_who_goes() -> None:
    here, there = Wire.pair()
    link = Link(Given(here), 5, 2, Wakeup(), tuning=replace(TUNING, linger=0.05))
    eventually(lambda: link.state is LinkState.OPEN, "it is open")
    link.begin_close()
    assert Header.unpack(there.back.get(timeout=LONG)) == BYE
    link.close()
    assert here.closed.is_set()
    eventually(lambda: link.finished, "its threads end")


@given(
    st.builds(
        Header,
        tag=st.text(max_size=20),
        dtype=st.sampled_from(["float32", "bfloat16", "uint8", "float8_e4m3fn"]),
        shape=st.lists(st.integers(0, 2**40), max_size=8).map(tuple),
        nbytes=st.integers(0, 2**50),
        direct=st.booleans(),
    )
)
def test_header_arrives_as_it_was_sent(header: Header) -> None:
    packed = header.pack()
    assert (packed.dtype, packed.shape) == (torch.uint8, (HEADER_BYTES,))
    assert Header.unpack(packed) == header


def test_group_of_bulk_that_is_cut_alone_loses_the_link() -> None:
    states, bulk = Wire.pair(), Wire.pair()
    ends = [
        Link(Given(*wires), 5, peer, Wakeup(), tuning=replace(TUNING, linger=0.05))
        for peer, wires in zip((2, 1), zip(states, bulk, strict=True), strict=True)
    ]
    eventually(lambda: all(end.state is LinkState.OPEN for end in ends), "both are open")
    bulk[0].close()
    with pytest.raises(LinkError, match="Connection closed by peer"):
        ends[0].recv("kv", LONG)
    assert ends[0].state is LinkState.LOST
    for end in ends:
        end.close()
