"""How much the next step of a generation loop may take, so that its requests get on however little memory its steps
find. Pure: sizes of steps in, limits out.

Note [Progress]
    A step that finds no memory is lost. The next one takes half as many requests, or where it had one, half as many of
    its tokens. So without a new token at most log2(requests) + log2(tokens) steps are lost until one request computes
    one token, which is tried a few times. A halving is taken back only by steps that gave a token: so at most half of
    all steps are lost in the long run. It takes one such step at first, and several times as many each time that the
    larger step is lost again. A step in the middle of a prompt gives none: the prompt goes on in parts that have found
    memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from .tuning import DEFAULT, Serving

# Steps that give tokens until a larger one is tried: so many times as many after each lost step, half as many after
# each larger one. Chosen: see `Serving.pause`.
_SLOWER: Final = 4


class StepProgress:
    """The limits of one loop's next step, and the tries of requests that it cannot make smaller steps for. Used by one
    thread."""

    def __init__(self, tuning: Serving = DEFAULT.serving) -> None:
        self._tuning = tuning
        self._limits = [(math.inf, math.inf)]  # each smaller than the one before
        self._given = 0  # steps that gave a token since the limits changed
        self._pause = 1  # so many of them take a halving back
        self._tries: dict[str, int] = {}  # by request: its lost steps of one token since its last one
        self._looks = 0  # attempts to find memory for a lone request since the last token
        self.settled = True  # is no step lost, and no attempt vain, that `give` has not made up for?

    @property
    def requests(self) -> float:
        """Requests that the next step may take: one or more."""
        return self._limits[-1][0]

    @property
    def tokens(self) -> float:
        """New tokens that the next step may take: one or more."""
        return self._limits[-1][1]

    def lose(self, sizes: Mapping[str, int], others: bool) -> int:
        """Notes that a step of these requests, with so many new tokens of each, was lost. `others`: do other requests
        have memory that they will give back? Returns how often that happened to the one request, with one token and no
        others, since its last token: 0 where a smaller step comes next, or others go first."""
        requests, tokens = len(sizes), sum(sizes.values())
        self.settled = False
        self._given, self._pause = 0, min(_SLOWER * self._pause, self._tuning.pause)
        limits = (requests // 2, math.inf) if requests > 1 else (1, tokens // 2 or math.inf)
        if limits < self._limits[-1]:
            self._limits.append(limits)
        if requests > 1 or tokens > 1 or others:
            return 0
        (name,) = sizes
        self._tries[name] = self._tries.get(name, 0) + 1
        return self._tries[name]

    def give(self, requests: Iterable[str]) -> bool:
        """Notes that a step gave each of these requests a token. Returns whether more may be tried from now on. Changes
        nothing while all is `settled`."""
        self._looks = 0
        for name in requests if self._tries else ():
            self.forget(name)
        self._given += 1
        if self._given < self._pause:
            return False
        self._given, self._pause = 0, max(1, self._pause // 2)
        if len(self._limits) > 1:
            self._limits.pop()
        self.settled = self._pause == 1 == len(self._limits) and not self._tries
        return True

    def forget(self, request: str) -> None:
        """Forgets the tries of a request that ends."""
        self._tries.pop(request, None)

    def wait(self) -> bool:
        """Notes that a lone request found no memory to make a step with. May it look again?"""
        self._looks += 1
        self.settled = False
        return self._looks <= self._tuning.lonely
