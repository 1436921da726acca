"""The index of a prefix cache, against a model that looks at everything each time; and what blocks are worth."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path as File

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballonet.offload.policy import prefixes
from ballonet.offload.policy.prefixes import Density, Hits, Index, Recency, chain, densities

MOONCAKE = File(__file__).parents[2] / "shared" / "data" / "traces" / "mooncake_conversation_trace.jsonl"
Path = tuple[int, ...]  # tokens from the first; as a key it stands for all of them


def keys_of(path: Sequence[int]) -> list[Hashable]:
    return [tuple(path[: n + 1]) for n in range(len(path))]


PATHS = st.lists(st.integers(0, 2), max_size=6).map(keys_of)
OWNERS = st.integers(0, 3)


class Indexed(RuleBasedStateMachine):
    """The model: which keys are there, whose they are, how often pinned, when last used. All else is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(6, Recency())
        self.owners: dict[Hashable, int] = {}
        self.used: dict[Hashable, int] = {}
        self.pins: dict[Hashable, int] = {}
        self.hits = Hits()
        self.clock = 0

    def use(self, key: Hashable) -> None:
        self.clock += 1
        self.used[key] = self.clock

    def children(self, key: Hashable) -> list[Hashable]:
        return [other for other in self.owners if other[:-1] == key]  # type: ignore[index]

    def below(self, key: Hashable) -> set[Hashable]:
        return {other for other in self.owners if other[: len(key)] == key}  # type: ignore[index, arg-type]

    def leading(self, keys: Sequence[Hashable]) -> int:
        return max(n for n in range(len(keys) + 1) if all(key in self.owners for key in keys[:n]))

    @rule(keys=PATHS)
    def match(self, keys: list[Hashable]) -> None:
        length = self.leading(keys)
        assert self.index.peek(keys) == length
        assert self.index.match(keys) == length
        for key in keys[:length]:
            self.use(key)
        self.hits.requests += 1
        self.hits.blocks += len(keys)
        self.hits.hit_blocks += length

    @rule(keys=PATHS, owner=OWNERS)
    def insert(self, keys: list[Hashable], owner: int) -> None:
        new = [key for key in keys if key not in self.owners]
        assert self.index.insert(keys, owner) == new
        for key in new:
            self.owners[key] = owner
            self.use(key)

    @rule(keys=PATHS)
    def pin(self, keys: list[Hashable]) -> None:
        self.index.pin(keys)
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, count in self.pins.items() if count)))  # type: ignore[type-var]
        self.index.unpin([key])
        self.pins[key] -= 1

    @rule(count=st.integers(0, 4), only=st.none() | st.sets(OWNERS))
    def evict(self, count: int, only: set[int] | None) -> None:
        expected = []
        for _ in range(count):
            leaves = [
                key
                for key, owner in self.owners.items()
                if not self.children(key) and not self.pins.get(key) and (only is None or owner in only)
            ]
            if not leaves:
                break
            key = min(leaves, key=lambda key: self.used[key])
            expected.append((self.owners.pop(key), key))
        evicted = self.index.evict(count, None if only is None else lambda owner, _: owner in only)
        assert evicted == expected

    @rule()
    def evict_what_is_too_much(self) -> None:
        assert self.index.excess() == max(0, len(self.owners) - 6)
        for _, key in self.index.evict(self.index.excess()):
            del self.owners[key]
        if not any(self.pins.values()):
            assert len(self.index) <= 6
            assert self.index.excess() == 0

    @rule(keys=PATHS)
    def forget(self, keys: list[Hashable]) -> None:
        gone = {below for key in keys for below in self.below(key)}
        forgotten = self.index.forget(keys)
        assert len(forgotten) == len(gone)
        assert set(forgotten) == {(self.owners[key], key) for key in gone}
        lengths: list[Hashable] = []
        for _, key in forgotten:
            assert not any(other[:-1] == key for _, other in forgotten[len(lengths) + 1 :])  # type: ignore[index]
            lengths.append(key)
            del self.owners[key]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.owners.clear()

    @invariant()
    def is_the_model(self) -> None:
        assert set(self.index) == set(self.owners)
        assert len(self.index) == len(self.owners)
        assert {key: self.index.owner(key) for key in self.index} == self.owners
        assert self.index.hits == self.hits
        for key in [None, *self.owners]:
            hanging = self.children(() if key is None else key)
            assert sorted(self.index.after(key)) == sorted((self.owners[key], key) for key in hanging)
        for key in self.owners:
            assert key[:-1] in self.owners or len(key) == 1, "what is stored can be reached"  # type: ignore[index, arg-type]


Indexed.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexed = Indexed.TestCase


@given(st.lists(st.tuples(PATHS, st.booleans()), max_size=30), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_blocks_evicted_by_density_are_leaves_nobody_pinned(
    requests: list[tuple[list[Hashable], bool]], room: int
) -> None:
    index = Index(room)
    pinned: set[Hashable] = set()
    for owner, (keys, pin) in enumerate(requests):
        index.match(keys)
        index.insert(keys, owner)
        if pin and len(pinned) < room - len(keys):
            index.pin(keys)
            pinned.update(keys)
        before = set(index)
        for _, key in index.evict(index.excess()):
            before.remove(key)
            assert key not in pinned
            assert not any(other[:-1] == key for other in before)  # type: ignore[index]
        assert before == set(index)
        assert len(index) <= room


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        (lambda: Index(-1), ValueError, "not below 0"),
        (lambda: Index().owner("a"), KeyError, "a"),
        (lambda: Index().unpin("b"), ValueError, "'b' is not pinned"),
        (lambda: chain([1], 0, b""), ValueError, "at least one token"),
    ],
    ids=range(4),
)
def test_impossible_index_is_refused(what: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        what()


def held(index: Index) -> int:
    """Bytes of all that the index refers to."""
    return len(pickle.dumps(index))


@pytest.mark.parametrize("used", ["again", "anew"])
def test_an_index_that_is_used_without_end_does_not_grow(used: str) -> None:
    index, sizes = Index(10), []
    for n in range(2000):
        keys = [str(n), "b"] if used == "anew" else ["a", "b", "c"]
        index.match(keys)
        index.insert(keys, 1)
        index.pin(keys)
        index.unpin(keys)
        index.evict(index.excess())
        sizes.append(held(index) if n % 100 == 99 else 0)
    assert max(sizes) < 2 * max(sizes[:500])


def test_keys_in_another_order_than_before_harm_nothing() -> None:
    """As in a trace whose ids are no hashes of prefixes."""
    index = Index()
    index.insert("abc", 1)
    assert index.insert("cbax", 2) == ["x"]
    assert index.match("xa") == 2
    assert index.insert("yy", 3) == ["y"]
    assert index.match(["b", "q", "a"]) == 1
    assert sorted(key for _, key in index.evict(9)) == ["a", "b", "c", "x", "y"]


# -- chain


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
@example([1, 2, 3], [1, 2, 3, 1], 3)
def test_keys_are_the_same_exactly_as_far_as_all_tokens_are(one: list[int], other: list[int], block: int) -> None:
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first, second = chain(one, block, b"model"), chain(other, block, b"model")
    assert (len(first), len(second)) == (len(one) // block, len(other) // block)
    alike = [a == b for a, b in zip(first, second, strict=False)]
    assert alike == [n < same // block for n in range(len(alike))]
    assert not {*first} & {*chain(one, block, b"adapter")}
    assert len({*first}) == len(first)
    assert all(len(key) == 16 for key in first)
    assert all(chain(one, block, b"model", first[:count]) == first for count in range(len(first) + 1))


def test_keys_stay_what_they_are() -> None:
    """Files are found by them, written on another day by another version."""
    assert [key.hex() for key in chain(range(5), 2, b"salt")] == [
        "df2bc2f9378ad006b47c4e430d32fb7c",
        "e1b1e591180e25e7be28fbac14363448",
    ]


# -- what blocks are worth


def replay(requests: Sequence[Sequence[Hashable]], room: int, policy: prefixes.Policy) -> float:
    index = Index(room, policy)
    for owner, keys in enumerate(requests):
        index.match(keys)
        index.insert(keys, owner)
        index.evict(index.excess())
    return index.hits.hit_rate


def documents(seed: int, count: int = 1500) -> list[list[Hashable]]:
    """Some are asked about again and again, and between them come long ones that nobody asks about twice."""
    chance = random.Random(seed)
    requests: list[list[Hashable]] = []
    for n in range(count):
        if chance.random() < 0.5:
            hot = min(int(chance.expovariate(1 / 12)), 49)
            requests.append([("hot", hot, block) for block in range(8)])
        else:
            requests.append([("scan", n, block) for block in range(24)])
    return requests


def test_blocks_read_once_do_not_drive_out_those_read_often() -> None:
    trace = documents(0)
    assert replay(trace, 220, Density()) > 2 * replay(trace, 220, Recency()) > 0


def test_blocks_read_in_rounds_are_not_all_lost() -> None:
    trace = [[(n % 30, block) for block in range(4)] for n in range(1500)]
    assert replay(trace, 100, Recency()) == 0.0
    assert replay(trace, 100, Density()) > 0.01


def talks(seed: int, count: int = 150) -> list[list[Hashable]]:
    """Conversations that begin one after another; between their turns pass times with a heavy tail. All alike, so what
    was used last is the best guess."""
    chance = random.Random(seed)
    turns: list[tuple[float, list[Hashable]]] = []
    for number in range(count):
        when, said = float(number), 0
        while not said or chance.random() < 0.85:
            said += chance.randrange(1, 6)
            turns.append((when, [(number, block) for block in range(said)]))
            when += chance.lognormvariate(2.5, 1.6)
    return [keys for _, keys in sorted(turns, key=lambda turn: turn[0])]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("room", [40, 150])
def test_conversations_that_are_all_alike_find_what_least_recently_used_does(seed: int, room: int) -> None:
    trace = talks(seed)
    assert replay(trace, room, Density()) >= replay(trace, room, Recency()) > 0


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"{MOONCAKE} is not here: the recorded requests of Mooncake")
def test_recorded_conversations_find_more_than_least_recently_used_in_little_room() -> None:
    trace = [json.loads(line)["hash_ids"] for line in MOONCAKE.read_text().splitlines()]
    assert round(replay(trace, 3656, Recency()), 4) == 0.0793
    assert replay(trace, 3656, Density()) > 0.14


def test_before_anything_is_known_the_least_recently_used_goes() -> None:
    one, other = Index(6), Index(6, Recency())
    for index in (one, other):
        for keys in ("ab", "cd", "ef", "gh"):
            index.match(keys)
            index.insert(keys, keys)
    assert one.evict(2) == other.evict(2) == [("ab", "b"), ("ab", "a")]


@given(st.lists(st.tuples(st.integers(0, 20).map(float), st.integers(1, 20).map(float)), max_size=8))
def test_density_is_that_of_the_best_time_to_stop(steps: list[tuple[float, float]]) -> None:
    best = [
        max(
            sum(hits for hits, _ in steps[first:end]) / sum(time for _, time in steps[first:end])
            for end in range(first + 1, len(steps) + 1)
        )
        for first in range(len(steps))
    ]
    assert densities(steps) == pytest.approx(best)


def test_counts_of_long_ago_weigh_less() -> None:
    policy = Density(learned=10)
    index = Index(None, policy)
    index.insert("a", 1)
    for _ in range(200):
        index.match("a")
    assert sum(policy._every.returned) <= 10
    assert policy._every.uses <= 11


def test_a_prompt_that_returns_stays_once_it_was_lost_a_few_times() -> None:
    """Blocks asked for once drive it out until that has been seen often enough, and never again."""
    index, matched = Index(30), []
    hot = [("hot", block) for block in range(4)]
    for turn in range(40):
        matched.append(index.match(hot))
        for keys in [hot, *([(turn, prompt, block) for block in range(6)] for prompt in range(5))]:
            index.insert(keys, turn)
            index.evict(index.excess())
    lost = matched.count(0)
    assert matched == [0] * lost + [4] * (40 - lost)
    assert 1 < lost < 20


def test_uses_of_evicted_blocks_are_remembered() -> None:
    policy = Density()
    index = Index(10, policy)
    for n in (*range(500), 480):
        index.insert([n], n)
        index.evict(index.excess())
    assert policy._stored[480].uses == 2, "it was evicted, and came back"
    index.forget([499])
    index.insert([499], 0)
    assert policy._stored[499].uses == 1, "what was forgotten says nothing about returns"


def test_an_eviction_looks_at_one_block_of_each_kind_however_many_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def looked(size: int) -> int:
        index = Index(size)
        looks.clear()
        with monkeypatch.context() as patch:
            true = Index._candidate
            patch.setattr(Index, "_candidate", lambda *args: looks.append(1) or true(*args))
            for n in range(4 * size):
                keys = [n % (2 * size), -1 - n]
                index.match(keys)
                index.insert(keys, n)
                index.evict(index.excess())
        return len(looks)

    assert looked(1600) < 5 * looked(400)
