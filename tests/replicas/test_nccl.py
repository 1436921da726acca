"""Pairs whose device memory goes over NCCL, with communicators that are as strict as NCCL and run on any machine."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.link import Link, LinkState
from ballonet.hooks.replicas.pair import GlooConnect, GlooPair, LinkGpu, NcclConnect, NcclPair, Store
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

LONG = 120.0
CPU = torch.device("cpu")
TUNING = ReplicaTuning(forming=LONG, linger=LONG)
EPOCHS = itertools.count(1)


class Streams:
    """Which stream is the current one of each thread: None the one that models compute on."""

    def __init__(self) -> None:
        self._of = threading.local()

    @property
    def current(self) -> str | None:
        return getattr(self._of, "name", None)

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        before, self._of.name = self.current, name
        try:
            yield
        finally:
            self._of.name = before


class Work:
    """An operation of a communicator. It may be looked at, and not waited for: a wait has no deadline."""

    def __init__(self, kind: str, tensor: torch.Tensor) -> None:
        self.kind = kind
        self.tensor = tensor
        self.over = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.over.is_set()

    def exception(self) -> Exception | None:
        return self.error


class Communicators:
    """All communicators of a test. Each runs its operations in order, and each waits for the other end's."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.aborted: list[tuple[str, int]] = []
        self.most = 0  # outstanding operations of one communicator
        self._ends: dict[tuple[str, int], deque[Work]] = {}
        self._lock = threading.Lock()

    def make(self, store: Store, prefix: str, rank: int, timeout: float) -> Communicator:
        assert (prefix, rank) not in self._ends, "a rank joins a communicator once"
        self._ends[prefix, rank] = deque()
        return Communicator(self, prefix, rank)

    def submit(self, prefix: str, rank: int, work: Work) -> Work:
        assert self.streams.current == "pair", "it would wait for what models compute"
        assert work.tensor.is_contiguous()
        with self._lock:
            self._ends[prefix, rank].append(work)
            self.most = max(self.most, len(self._ends[prefix, rank]))
            one, other = self._ends.get((prefix, 0), deque()), self._ends.get((prefix, 1), deque())
            while one and other and {one[0].kind, other[0].kind} == {"send", "recv"}:
                pair = sorted((one.popleft(), other.popleft()), key=lambda work: work.kind)
                assert pair[0].tensor.numel() == pair[1].tensor.numel(), "NCCL knows no sizes"
                pair[0].tensor.copy_(pair[1].tensor)
                for end in pair:
                    end.over.set()
        return work

    def outstanding(self) -> int:
        return sum(map(len, self._ends.values()))


class Communicator:
    def __init__(self, all_: Communicators, prefix: str, rank: int) -> None:
        self._all = all_
        self._state = prefix, rank

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        return self._begin("send", tensors, other)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        return self._begin("recv", tensors, other)

    def abort(self) -> None:
        self._all.aborted.append(self._state)

    def _begin(self, kind: str, tensors: list[torch.Tensor], other: int) -> Work:
        assert other == 1 - self._state[1]
        (tensor,) = tensors
        return self._all.submit(*self._state, Work(kind, tensor))


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.host(timeout=LONG)


def connects(store: Store, epoch: int, all_: Communicators, gpus: tuple[str, str]) -> list[NcclConnect]:
    """Connections of the members 1 and 2."""
    return [
        NcclConnect(
            store,
            epoch,
            me,
            peer,
            LONG,
            LinkGpu(gpu, CPU, lambda: all_.streams.entered("pair"), LONG, all_.make),
        )
        for (me, peer), gpu in zip(((1, 2), (2, 1)), gpus, strict=True)
    ]


def formed(one: Callable[[], Any], other: Callable[[], Any]) -> list[Any]:
    pairs: list[Any] = [None, None]

    def form(number: int, make: Callable[[], Any]) -> None:
        pairs[number] = make()

    threads = [threading.Thread(target=form, args=connect) for connect in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return pairs


def links(store: Store, epoch: int, all_: Communicators) -> tuple[Link, Link]:
    wakeup = Wakeup()
    ends = [
        Link(connect, epoch, peer, wakeup, device=CPU, tuning=TUNING)
        for connect, peer in zip(connects(store, epoch, all_, ("GPU-a", "GPU-b")), (2, 1), strict=True)
    ]
    assert wakeup.wait(lambda: all(end.state is LinkState.OPEN for end in ends) or None, LONG)
    return ends[0], ends[1]


def test_both_ends_send_at_once_and_nothing_is_outstanding_where_a_link_idles(store: Store) -> None:
    """With one communicator for both ways each end's receive would wait behind its own send."""
    epoch, all_ = next(EPOCHS), Communicators()
    one, other = links(store, epoch, all_)
    for number in range(5):
        for end in (one, other):
            end.send(torch.full((1000,), number + (end is one), dtype=torch.int64), "states", urgent=True)
            end.send(torch.full((3, 5), number, dtype=torch.bfloat16), "weights")
    for number in range(5):
        assert other.recv("states", LONG).tolist() == [number + 1] * 1000
        assert one.recv("states", LONG).tolist() == [number] * 1000
        for end in (one, other):
            received = end.recv("weights", LONG)
            assert (received.dtype, received.tolist()) == (torch.bfloat16, [[number] * 5] * 3)
    assert all_.outstanding() == 0
    assert all_.most == 1, "a receive is submitted once its header has come"
    one.close()
    other.close()
    assert {place[1] for place in all_.aborted} <= {0, 1}


@pytest.mark.parametrize("gpus", [("GPU-a", "GPU-a"), ("", "GPU-b"), ("GPU-a", ""), ("", "")])
def test_two_replicas_on_one_gpu_or_without_any_use_gloo(store: Store, gpus: tuple[str, str]) -> None:
    epoch, all_ = next(EPOCHS), Communicators()
    ends = formed(*connects(store, epoch, all_, gpus))
    pairs = [pair for pairs in ends for pair in pairs]
    assert len(pairs) == 4
    assert all(isinstance(pair, GlooPair) and not pair.direct for pair in pairs)
    for pair in pairs:
        pair.close()


def test_keys_of_a_pair_that_one_end_forms_alone_are_deleted(store: Store) -> None:
    epoch, all_ = next(EPOCHS), Communicators()
    before = store.keys()
    ends = connects(store, epoch, all_, ("GPU-a", "GPU-b"))
    pairs = formed(*ends)
    for way in ("states/there", "states/back", "bulk/there", "bulk/back"):  # as NCCL's own forming does
        store.set(f"epoch/{epoch}/link/1-2/{way}/0", "id")
    for end in ends:
        end.delete_keys()
    assert store.keys() == before
    for pair in (*pairs[0], *pairs[1]):
        pair.close()


@pytest.fixture
def pair(store: Store) -> Iterator[tuple[NcclPair, Communicators, list[float]]]:
    """One end, whose other end submits nothing; and the time of its clock."""
    all_, now = Communicators(), [0.0]
    epoch = next(EPOCHS)
    control = [
        pairs[0] for pairs in formed(*(GlooConnect(store, epoch, *direction, LONG) for direction in ((1, 2), (2, 1))))
    ]
    groups = [all_.make(store, way, 0, LONG) for way in ("out", "into")]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    gpu = LinkGpu("", CPU, lambda: all_.streams.entered("pair"), 50.0)
    made = NcclPair(control[0], *groups, 1, gpu, clock)
    yield made, all_, now
    made.close()
    control[1].close()


def test_an_operation_that_does_not_end_is_given_up(pair: tuple[NcclPair, Communicators, list[float]]) -> None:
    nccl, _, now = pair
    with pytest.raises(RuntimeError, match="has not ended an operation in 50 s"):
        nccl.send(torch.zeros(8, dtype=torch.uint8), direct=True)
    assert now[0] >= 50


def test_an_error_of_an_operation_is_raised(
    pair: tuple[NcclPair, Communicators, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl, all_, _ = pair

    def fails(prefix: str, rank: int, work: Work) -> Work:
        work.error = ValueError("unhandled system error")
        work.over.set()
        return work

    monkeypatch.setattr(all_, "submit", fails)
    with pytest.raises(RuntimeError, match="NCCL: unhandled system error"):
        nccl.recv(torch.zeros(8, dtype=torch.uint8), direct=True)


def test_close_ends_an_operation_that_waits_and_aborts_both_ways(store: Store) -> None:
    all_, epoch = Communicators(), next(EPOCHS)
    control = [
        pairs[0] for pairs in formed(*(GlooConnect(store, epoch, *direction, LONG) for direction in ((1, 2), (2, 1))))
    ]
    groups = [all_.make(store, way, 0, LONG) for way in ("out", "into")]
    gpu = LinkGpu("", CPU, lambda: all_.streams.entered("pair"), LONG)
    nccl = NcclPair(control[0], *groups, 1, gpu)
    raised: list[str] = []

    def waits() -> None:
        try:
            nccl.recv(torch.zeros(8, dtype=torch.uint8), direct=True)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=waits)
    thread.start()
    while not all_.outstanding():
        pass
    nccl.close()
    nccl.close()
    thread.join(LONG)
    assert raised == ["this end of the link is closed"]
    with pytest.raises(RuntimeError, match="closed"):
        nccl.send(torch.zeros(8, dtype=torch.uint8), direct=True)
    while len(all_.aborted) < 2:
        pass
    assert sorted(all_.aborted) == [("into", 0), ("out", 0)]
    control[1].close()


def test_received_tensors_are_allocated_on_the_stream_of_the_pair(
    pair: tuple[NcclPair, Communicators, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl, all_, _ = pair
    seen: list[str | None] = []
    stock = torch.empty

    def empty(*args: Any, **given: Any) -> torch.Tensor:
        seen.append(all_.streams.current)
        return stock(*args, **given)

    monkeypatch.setattr(torch, "empty", empty)
    assert nccl.device_buffer(16).numel() == 16
    assert seen == ["pair"]
