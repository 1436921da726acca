"""While nothing has happened a model is told the same again, and whatever may change that is noticed: the manager that
does so beside one that looks at everything each time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.policy.tuning import DEFAULT

from .fake_manager import LINK, FakeCache, FakeDevice, FakeModel, a_manager
from .tuned import Clock

PAGES = DEFAULT.pages
MODELS: tuple[dict[str, Any], ...] = ({}, {"tpot": 0.06}, {"priority": 1, "floor": 5000}, {"interval": None})


class World:
    """A device with models and caches. `repeats`: may its manager tell a model the same again?"""

    def __init__(self, pages: int, models: int, repeats: bool) -> None:
        self.device: FakeDevice
        self.manager: MemoryManager
        self.clock: Clock
        self.models: list[FakeModel]
        self.device, self.manager, self.clock, self.models = a_manager(pages, *MODELS[:models])
        self.caches: list[FakeCache] = []
        self.repeated = 0
        asked = self.manager._known.repeated

        def count(*given: Any) -> Any:
            answer = asked(*given) if repeats else None
            self.repeated += answer is not None
            return answer

        self.manager._known.repeated = count  # type: ignore[method-assign]

    def step(self, which: int, phase: Literal["decode", "prefill"], batch: int, length: int, cache: int) -> object:
        model = self.models[which % len(self.models)]
        if model not in self.device.models:
            return None
        model.running = True
        try:
            decision = model.step(self.manager, phase, batch, length)
            if self.caches and cache >= 0:
                self.caches[cache % len(self.caches)].step(cache % 2)
            return decision
        except MemoryError:
            return "no pages"
        finally:
            model.running = False

    def steps(self, which: int, times: int, seconds: float, length: int) -> object:
        answers = []
        for n in range(times):
            self.clock.now += seconds
            answers.append(self.step(which, "decode", 1, length + n, -1))
        return answers

    def rounds(self, times: int, seconds: float) -> object:
        """Every model, and every cache that is not only kept, in turns: nobody rests for as long as turns are short."""
        answers = []
        for _ in range(times):
            self.clock.now += seconds
            for n in range(len(self.models)):
                answers.append(self.step(n, "decode", 1, 17, -1))
            for cache in self.caches:
                if not cache.only_cached:
                    cache.step()
        return answers

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def cache(self) -> None:
        self.caches.append(FakeCache(self.device, self.manager, self.clock, f"cache {len(self.caches)}"))

    def drop(self, cache: int, pages: int) -> None:
        if self.caches:
            self.caches[cache % len(self.caches)].drop(pages)

    def keep(self, cache: int, kept: bool) -> None:
        if self.caches:
            its = self.caches[cache % len(self.caches)]
            its.only_cached = kept
            self.manager.client_changed(its.number)

    def lose(self, cache: int, late: bool) -> None:
        """The model is collected. `late`: while somebody holds the lock."""
        if self.caches:
            its = self.caches.pop(cache % len(self.caches))
            self.device.caches.remove(its)
            self.device.listed = [entry for entry in self.device.listed if entry[1] is not its]
            if late:
                self.device.kv += its.device_pages  # which another one has by now
                self.manager._known.clients.client_left(its.number)
            else:
                self.manager.remove_client(its.number)

    def take(self) -> None:
        """Somebody else takes what is first on the list, and uses it."""
        before = self.device.free
        if self.device.listed and self.device.want(before + 1):
            self.device.kv += self.device.free - before

    def budget_for_others(self, pages: int) -> None:
        if self.device.kv + pages >= 0:
            self.device.budget += 1000 * pages
            self.device.kv += pages

    def copies(self) -> None:
        self.manager.copies_changed()

    def others(self, pages: int) -> None:
        """Somebody else takes pages, of what is listed too, or gives them back."""
        self.device.kv = max(0, self.device.kv + pages) if pages < 0 else self.device.kv
        if pages > 0:
            self.device.grow(pages)

    def budget(self, pages: int) -> None:
        if self.device.free + pages >= 0:
            self.device.budget += 1000 * pages

    def demand(self, pages: int) -> None:
        self.device.page_request = pages

    def traffic(self, rate: int) -> None:
        self.manager.link.set_traffic(rate * LINK / 16)

    def seconds(self, which: int, decode: float) -> None:
        model = self.models[which % len(self.models)]
        model.times["decode"] = decode
        self.manager.changed(model)

    def wanted(self, which: int, now: bool) -> None:
        model = self.models[which % len(self.models)]
        model.wanted = math.inf if now else self.clock.now
        self.manager.changed(model)

    def remove(self, which: int) -> None:
        model = self.models[which % len(self.models)]
        if model in self.device.models and len(self.device.models) > 1:
            self.manager.remove(model)
            self.device.models.remove(model)

    def add(self, which: int) -> None:
        model = self.models[which % len(self.models)]
        if model not in self.device.models and self.device.free >= model.device_pages:
            self.device.models.append(model)
            self.manager.add(model)

    def seen(self) -> object:
        """All that the manager decides, and whatever it is decided by the next time."""
        device, known = self.device, self.manager._known
        return (
            device.free,
            device.trace,
            device.published,
            [(key, index) for key, _, (index,) in device.listed],
            [(model.plan, model.gone, model.loaded) for model in device.models],
            [(state.used, state.usual, state.left, state.point, state.passes) for state in known.clients.models],
            [(cache.pages, cache.away, cache.clean, cache.asked_to_copy, cache.gave_buffers) for cache in self.caches],
            [
                (state.used, state.usual, state.left, state.waited, state.activity.at)
                for state, _ in known.clients.paged
            ],
            (self.manager.pages.short, self.manager.pages.scarce, known.horizon),
            (known.lending.due_at, [self.manager.repayment.lending_of(model) for model in device.models]),
        )


some = st.integers(0, 3)
seconds = st.sampled_from([0.0, 1 / 64, 1 / 4, 1.0, 4.0, 16.0, 64.0])  # exact, as are their sums
EVENTS = st.one_of(
    st.tuples(
        st.just(World.step), some, st.sampled_from(["decode", "decode", "prefill"]), some.map(lambda n: n + 1),
        st.integers(1, 9), st.integers(-1, 3),
    ),
    st.tuples(st.just(World.steps), some, st.integers(1, 12), seconds, st.integers(1, 9)),
    st.tuples(st.just(World.wait), seconds),
    st.tuples(st.just(World.cache)),
    st.tuples(st.just(World.drop), some, some),
    st.tuples(st.just(World.keep), some, st.booleans()),
    st.tuples(st.just(World.lose), some, st.booleans()),
    st.tuples(st.just(World.take)),
    st.tuples(st.just(World.copies)),
    st.tuples(st.just(World.others), st.integers(-80, 80)),
    st.tuples(st.just(World.budget), st.integers(-20, 20)),
    st.tuples(st.just(World.budget_for_others), st.integers(-90, 90)),
    st.tuples(st.just(World.demand), st.sampled_from([0, 1])),
    st.tuples(st.just(World.traffic), st.integers(0, 15)),
    st.tuples(st.just(World.seconds), some, st.sampled_from([0.005, 0.02, 0.1])),
    st.tuples(st.just(World.wanted), some, st.booleans()),
    st.tuples(st.just(World.remove), some),
    st.tuples(st.just(World.add), some),
)  # fmt: skip
ROUNDS = st.tuples(st.integers(3, 48), st.sampled_from([1 / 64, 1 / 4]))


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(0, 160), st.integers(0, 2), st.lists(st.tuples(EVENTS, ROUNDS), max_size=10))
def test_a_repeated_answer_is_what_a_new_one_would_be(
    models: int, spare: int, caches: int, events: list[tuple[tuple[Callable[..., object], Any], tuple[int, float]]]
) -> None:
    repeats, looks = (World(40 * models + spare, models, repeating) for repeating in (True, False))
    start: list[tuple[Any, ...]] = [(World.cache,)] * caches
    for (act, *given_to_it), rounds in [*((beginning, (4, 1 / 64)) for beginning in start), *events]:
        assert act(repeats, *given_to_it) == act(looks, *given_to_it)
        assert repeats.seen() == looks.seen()
        for n in range(rounds[0]):
            assert repeats.rounds(1, rounds[1]) == looks.rounds(1, rounds[1])
            assert repeats.seen() == looks.seen(), n
    event("repeated" if repeats.repeated else "never repeated")


def told_again(world: World, times: int = 8) -> int:
    """How many of so many decode steps, a 64th of a second apart, are told the same again."""
    before = world.repeated
    world.steps(0, times, 1 / 64, 17)
    return world.repeated - before


@pytest.fixture
def calm() -> World:
    """A model, and a cache in use, that have run for a while with plenty of pages."""
    world = World(400, 1, repeats=True)
    world.cache()
    for _ in range(20):
        world.clock.now += 1 / 64
        world.step(0, "decode", 1, 17, 0)
    return world


def test_where_nothing_happens_the_same_is_told_again(calm: World) -> None:
    assert told_again(calm) == 8
    calm.wait(2 * PAGES.idle)  # the cache is not used any more, and rests
    assert told_again(calm) == 0


@pytest.mark.parametrize(
    ("act", "given_to_it"),
    [
        (World.step, (0, "prefill", 1, 17, -1)),
        (World.step, (0, "decode", 2, 17, -1)),
        (World.step, (0, "decode", 1, 40, -1)),
        (World.cache, ()),
        (World.lose, (0, False)),
        (World.keep, (0, True)),
        (World.others, (3,)),
        (World.budget, (1,)),
        (World.demand, (1,)),
        (World.traffic, (8,)),
        (World.seconds, (0, 0.1)),
        (World.wait, (2 * PAGES.idle,)),
    ],
)
def test_answer_is_made_anew_after_an_event(
    calm: World, act: Callable[..., object], given_to_it: tuple[Any, ...]
) -> None:
    assert told_again(calm, 2) == 2
    act(calm, *given_to_it)
    assert told_again(calm, 1) == 0
