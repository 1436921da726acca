"""Steps that find no memory are made smaller until they do: whatever steps a fault lets succeed, all requests that can
be computed end, with the right tokens, and at most half of the steps are lost in the long run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ballonet
from ballonet.offload.policy.progress import StepProgress
from ballonet.offload.policy.tuning import Serving

from .models import build
from .serving.batches import Answer, ask, install, looping, prompts, stock
from .serving.test_trouble import Lacking

TUNING = Serving(tries=2, pause=8, lonely=3)
BATCH = 64  # new tokens of a step, at most
lengths = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 6)), min_size=1, max_size=12)
Lost = Callable[[dict[str, int]], bool]  # of a step, by the new tokens of each request


class Loop:
    """A loop without a model. `asked`: (tokens of its prompt, new tokens) of each request."""

    def __init__(self, asked: Sequence[tuple[int, int]]) -> None:
        self.progress = StepProgress(TUNING)
        self.lost = self.gave = 0
        self.failed = dict[str, int]()  # by request: its tries
        self.answers = Counter[str]()
        self._left = {str(number): new for number, (_, new) in enumerate(asked)}
        self._lengths = {str(number): prompt for number, (prompt, _) in enumerate(asked)}
        self._computed = Counter[str]()

    def run(self, lost: Lost) -> None:
        """Makes steps until all requests have ended."""
        while self._left:
            self._step(lost)
            assert self.lost <= self.gave + 100

    def _step(self, lost: Lost) -> None:
        sizes, budget = dict[str, int](), min(BATCH, self.progress.tokens)
        for name in sorted(self._left, key=lambda name: not self._computed[name]):
            if budget and len(sizes) < self.progress.requests:
                sizes[name] = int(min(budget, self._lengths[name] + self.answers[name] - self._computed[name]))
                budget -= sizes[name]
        if lost(sizes):
            self.lost += 1
            others = any(self._computed[name] for name in self._left.keys() - sizes)
            tries = self.progress.lose(sizes, others)
            for name in sizes:
                self._computed[name] = 0
                self._left[name] = self._left.pop(name)  # behind those that wait
            if tries > TUNING.tries:
                self._left.pop(name)
                self.failed[name] = tries
            return
        self._computed.update(sizes)
        gave = [name for name in sizes if self._computed[name] == self._lengths[name] + self.answers[name]]
        self.answers.update(gave)
        if gave:
            self.gave += 1
            self.progress.give(gave)
        for name in gave:
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name]


def halvings(asked: Sequence[tuple[int, int]]) -> int:
    """Steps that can be lost one after the other until one token of one request is tried."""
    return len(asked).bit_length() + BATCH.bit_length()


@given(lengths, st.integers(1, 12), st.integers(1, BATCH))
def test_all_requests_end_whatever_steps_succeed(asked: list[tuple[int, int]], requests: int, tokens: int) -> None:
    """Steps of so many requests or fewer, and so many tokens or fewer."""
    loop = Loop(asked)
    loop.run(lambda sizes: len(sizes) > requests or sum(sizes.values()) > tokens)
    assert not loop.failed
    assert loop.answers == {str(number): new for number, (_, new) in enumerate(asked)}
    assert loop.lost <= loop.gave + halvings(asked)


@given(lengths, st.sets(st.integers(0, 11)), st.integers(1, 12))
def test_requests_that_can_never_be_computed_fail_and_the_others_end(
    asked: list[tuple[int, int]], never: set[int], requests: int
) -> None:
    loop, cursed = Loop(asked), {str(number) for number in never if number < len(asked)}
    loop.run(lambda sizes: len(sizes) > requests or bool(cursed & sizes.keys()))
    assert loop.failed == dict.fromkeys(cursed, TUNING.tries + 1)
    assert loop.answers == {str(n): new for n, (_, new) in enumerate(asked) if str(n) not in cursed}
    assert loop.lost <= loop.gave + halvings(asked) + len(cursed) * (TUNING.tries + 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, BATCH))))
def test_limits_are_raised_by_tokens_alone(steps: list[tuple[bool, int, int]]) -> None:
    """Whatever is lost: they are below what was lost, unless that cannot be made smaller."""
    progress, given_ = StepProgress(TUNING), 0
    for lost, most, tokens in steps:
        before = progress.requests, progress.tokens
        sizes = {str(n): 1 for n in range(int(min(most, before[0])))}
        sizes["0"] = int(min(tokens, before[1]))
        if lost:
            progress.lose(sizes, False)
            given_ = 0
            assert (progress.requests, progress.tokens) <= before
            assert progress.requests < len(sizes) or progress.requests == 1
            assert len(sizes) > 1 or progress.tokens < sizes["0"] or sizes["0"] == 1
        else:
            given_ += 1
            raised = progress.give([])
            assert raised or given_ < TUNING.pause
            assert (progress.requests, progress.tokens) >= before
            given_ = 0 if raised else given_


def test_larger_steps_are_tried_more_rarely_the_more_often_they_are_lost() -> None:
    loop = Loop([(1, 400)] * 4)
    loop.run(lambda sizes: len(sizes) > 1)
    assert loop.gave == 1600
    assert loop.lost < 1600 / (TUNING.pause - 1)


def test_a_lone_request_looks_for_memory_anew_after_each_token() -> None:
    progress = StepProgress(TUNING)
    for _ in range(2):
        assert [progress.wait() for _ in range(5)] == [True] * 3 + [False] * 2
        progress.give(["0"])


@settings(max_examples=15)
@given(requests=st.integers(1, 8), tokens=st.integers(1, BATCH))
def compare(
    model: Any, manager: Any, asked: list[list[int]], expected: list[Answer], requests: int, tokens: int
) -> None:
    """Asks a loop all of it while larger steps find no memory."""
    with Lacking(model, lambda _, new, count: count > requests or new > tokens) as lacking:
        assert ask(manager, asked) == expected
    assert 2 * lacking.failed <= lacking.steps + 2 * halvings([(0, 0)] * len(asked))


@pytest.mark.usefixtures("nothing_is_left")
def test_tokens_of_a_loop_are_right_whatever_steps_succeed() -> None:
    model, asked = build("llama", num_hidden_layers=4), prompts(8, 40)
    expected = stock(model, asked, 6)
    install(256)
    with ballonet.manage(model), looping(model, 6) as manager:
        compare(model, manager, asked, expected)
        del manager


@pytest.mark.usefixtures("nothing_is_left")
def test_a_request_of_a_loop_that_can_never_be_computed_fails_with_numbers() -> None:
    """One of its tokens finds no memory in any step."""
    model, asked = build("llama", num_hidden_layers=4), prompts(6, 20)
    expected = stock(model, asked, 6)
    asked.insert(2, [5, 6, 60, 7])
    install(256)

    def curse(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if (inputs[0] == 60).any():
            raise torch.OutOfMemoryError("no memory, says the test")

    with ballonet.manage(model), looping(model, 6) as manager:
        hook = model.model.embed_tokens.register_forward_pre_hook(curse)
        results = ask(manager, asked)
        hook.remove()
        error = results.pop(2).error
        assert results == expected
        assert error is not None
        assert "no memory for token 3 of request req_2, in 4 steps of it alone: of a budget of 16MiB, " in error
        del manager
