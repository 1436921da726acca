"""The ledger delivers each token once, and messages are decoded as they were sent."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.replicas.client_requests import RepeatedOtherwise, RequestLedger
from ballonet.hooks.replicas.messages import (
    Fingerprint,
    Hello,
    Join,
    JoinRefusal,
    Line,
    Message,
    Start,
    Told,
    Welcome,
    decoded,
    encoded,
)
from ballonet.hooks.replicas.microbatch_plan import Request, Sampling
from ballonet.offload.policy.replicas import actions, events
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.groups import Group, Span
from ballonet.offload.policy.replicas.restore_plan import Pull

REQUEST = Request("a", (1, 2, 3), 5, Sampling(7, 0.5, 3, 0.9), (9,), (4,))
GROUP = Group((2, 0), (Span(0, 3), Span(3, 8)))
MESSAGES: list[Message] = [
    Hello(1, "here", 2, (3, 4), 5, 6, ChunkCost(1e-9, 1e-5, 1e-3, decode=ChunkCost(0.0, 1e-5, 1e-3)), 0),
    Start(3, REQUEST),
    Told("a", 2, 1, (4, 5), "a reason"),
    Join(Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0"), (REQUEST,)),
    Welcome(3, "here", 29400, ChunkCost(1e-9, 1e-5, 1e-3)),
    Line("loading"),
    JoinRefusal(("torch is 2.12.0, not 2.13.0",)),
    actions.Prepare(4, (GROUP,), (Pull(2, 3, None), Pull(2, 4, 0))),
    actions.Commit(4, (("a", 2),)),
    actions.Discard(4, events.Reason.HOST_MEMORY),
    events.PrepareFailed(1.5, 4, 2, events.Reason.FILE_CHANGED),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    assert decoded(encoded(message, message)) == (message, message)


@pytest.mark.parametrize(
    "packed",
    [b"", b"nothing", encoded(MESSAGES[0])[:-1], msgspec.msgpack.encode([{"type": "Unheard"}]), b"\x91" * 100_000],
)
def test_bytes_that_are_no_message_raise_value_error(packed: bytes) -> None:
    with pytest.raises(ValueError, match="no message of this version"):
        decoded(packed)


def test_a_request_is_there_once() -> None:
    ledger = RequestLedger()
    ledger.accept(REQUEST, 0.0)
    with pytest.raises(ValueError, match="has not ended"):
        ledger.accept(REQUEST, 0.0)
    assert ledger.end("a") is not None
    assert ledger.end("a") is None
    ledger.accept(REQUEST, 0.0)
    assert [len(ledger), "a" in ledger, "b" in ledger] == [1, True, False]


def test_tokens_of_who_is_not_asked_any_more_do_not_count() -> None:
    ledger = RequestLedger()
    ledger.accept(Request("a", (1,), 9), 0.0)
    first, second = (ledger.assign("a").request.assignment for _ in range(2))
    assert ledger.deliver("a", first, 0, (5,)) == ()
    assert ledger.deliver("a", second, 0, (5,)) == (5,)
    assert ledger.deliver("b", second, 0, (5,)) == ()


def test_what_is_computed_again_has_to_be_the_same() -> None:
    ledger = RequestLedger()
    ledger.accept(Request("a", (1,), 9), 0.0)
    assignment = ledger.assign("a").request.assignment
    assert ledger.deliver("a", assignment, 0, (5, 6)) == (5, 6)
    with pytest.raises(RepeatedOtherwise):
        ledger.deliver("a", assignment, 1, (7,))
    with pytest.raises(ValueError, match="never came"):
        ledger.deliver("a", assignment, 3, (8,))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.tuples(st.integers(0, 19), st.integers(1, 5))))
def test_clients_get_each_token_once(answer: list[int], reports: list[tuple[int, int]]) -> None:
    """Reports of any parts of an answer, again and again: what is new of each is what comes behind the others."""
    ledger = RequestLedger()
    ledger.accept(Request("a", (1,), len(answer) + 1), 0.0)
    got: list[int] = []
    for begin, count in reports:
        before = min(begin, len(got))  # none is missing
        got += ledger.deliver(
            "a", ledger.assign("a").request.assignment, before, tuple(answer[before : before + count])
        )
    assert got == answer[: len(got)]
    assert ledger.entry("a").request.delivered == tuple(got)
