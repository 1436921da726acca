"""Headers of messages, and what is sent first."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.replicas.outbox import Outbox
from ballonet.hooks.replicas.wire import BYE, DTYPES, LONGEST_TAG, MESSAGE, WORDS, Header

HEADERS = st.builds(
    Header,
    kind=st.sampled_from([MESSAGE, BYE]),
    epoch=st.integers(0, 2**40),
    tag=st.text(max_size=LONGEST_TAG // 4),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 2**40), max_size=8).map(tuple),
    nbytes=st.integers(0, 2**50),
    urgent=st.booleans(),
    checksum=st.none() | st.integers(0, 2**32 - 1),
)


@given(HEADERS)
def test_a_header_arrives_as_it_was_sent(header: Header) -> None:
    words = header.encode()
    assert len(words) == WORDS
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert Header.decode(words) == header


def test_the_longest_tag_arrives() -> None:
    tag = "é" * (LONGEST_TAG // 2)
    assert Header.decode(Header(MESSAGE, 1, tag).encode()).tag == tag


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (Header(MESSAGE, 1, "x" * (LONGEST_TAG + 1)), "a tag has 96 bytes"),
        (Header(MESSAGE, 1, shape=(1,) * 9), "8 dimensions"),
        (Header(MESSAGE, 1, dtype="qint8"), "send its bytes"),
    ],
)
def test_what_no_header_can_say_is_refused(header: Header, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        header.encode()


@pytest.mark.parametrize(("word", "value"), [(0, 7), (1, 9), (4, 99), (4, -1), (5, 9), (6, -1), (8, 97)])
def test_damaged_headers_are_refused(word: int, value: int) -> None:
    words = Header(MESSAGE, 3, "kv", "bfloat16", (2, 3), 12).encode()
    words[word] = value
    with pytest.raises(ValueError, match=r"damaged|no header"):
        Header.decode(words)


def test_urgent_messages_go_before_bulk_and_each_kind_keeps_its_order() -> None:
    outbox: Outbox[str] = Outbox(lambda: 0.0, 16)
    for name in ("b1", "b2", "u1", "b3", "u2"):
        outbox.put(name, name, 1, urgent=name.startswith("u"))
    found = []
    for _ in range(5):
        waiting = outbox.next()
        assert waiting is not None
        found.append(waiting.message)
        outbox.mark_sent(waiting)
    assert found == ["u1", "u2", "b1", "b2", "b3"]
    assert [(row.tag, row.put, row.begun, row.ended) for row in outbox.log] == [
        ("u1", 3, 6, 7),
        ("u2", 5, 8, 9),
        ("b1", 1, 10, 11),
        ("b2", 2, 12, 13),
        ("b3", 4, 14, 15),
    ]


def test_a_closed_outbox_gives_back_what_it_had_and_ends_who_waits() -> None:
    outbox: Outbox[str] = Outbox(lambda: 0.0, 16)
    outbox.put("b", "b", 1, urgent=False)
    outbox.put("u", "u", 1, urgent=True)
    assert outbox.close("last") == ["u", "b"]
    assert not outbox.put("more", "more", 1, urgent=True)
    last = outbox.next()
    assert last is not None
    assert last.message == "last"
    assert outbox.next() is None

    waited: Outbox[str] = Outbox(lambda: 0.0, 16)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (waited.next(), ended.set()))
    thread.start()
    waited.close()
    assert ended.wait(60)
    thread.join()
