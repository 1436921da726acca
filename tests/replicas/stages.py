"""Groups of tiny models in one process and one thread, what they answer, and a supervisor as one replica sees it."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import torch
from msgspec import structs

import ballonet
from ballonet.allocator.errors import BallonetError
from ballonet.hooks.replicas.follower import Follower
from ballonet.hooks.replicas.frontend import FleetEngine
from ballonet.hooks.replicas.kv_exchange import Handed, HandedOver, Handover, Regrouping
from ballonet.hooks.replicas.leader import Leader, Notify
from ballonet.hooks.replicas.link import LinkState
from ballonet.hooks.replicas.messages import Message
from ballonet.hooks.replicas.microbatch_plan import Request, SplitPolicy, split_by_tokens
from ballonet.hooks.replicas.replica_model import GroupSettings, ReplicaModel, SpanCache
from ballonet.hooks.replicas.stage import Stage, WatchedLink
from ballonet.hooks.sampling.grammar import GrammarRefused, Grammars
from ballonet.hooks.sampling.settings import ChosenToken, Sampling
from ballonet.hooks.splice.splice import Splice
from ballonet.hooks.weights.model_parts import decoder_layers
from ballonet.offload.policy.replicas.groups import Group, Span

from ..models import VOCABULARY

Inbox = defaultdict[str, deque[torch.Tensor]]


class MemoryLink:
    """One end of a link within a thread, in the place of link.Link: what was sent is there at once."""

    error = None
    state = LinkState.OPEN
    finished = True

    def __init__(self, sent: Inbox, came: Inbox) -> None:
        self._sent, self._came = sent, came

    @classmethod
    def pair(cls) -> tuple[MemoryLink, MemoryLink]:
        there: Inbox = defaultdict(deque)
        back: Inbox = defaultdict(deque)
        return cls(there, back), cls(back, there)

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False, check: bool = False) -> None:
        """Sends a copy, as another process would get one."""
        self._sent[tag].append(tensor.detach().clone())

    def has(self, tag: str) -> bool:
        return bool(self._came[tag])

    def take(self, tag: str) -> torch.Tensor | None:
        return self._came[tag].popleft() if self.has(tag) else None

    def recv(self, tag: str, timeout: float, unless: Callable[[], bool]) -> torch.Tensor:
        """LookupError: nothing was sent, and the sender cannot run, in this thread."""
        if not self.has(tag):
            raise LookupError(f"nothing was sent as {tag}")
        return self._came[tag].popleft()

    def begin_close(self) -> None:
        """Nothing is to be told."""


def all_linked(members: Iterable[int]) -> dict[int, dict[int, Any]]:
    """Both ends of a link between any two: by its own number, and its peer's."""
    numbers = [*members]
    ends: dict[int, dict[int, Any]] = {number: {} for number in numbers}
    for one, other in combinations(numbers, 2):
        ends[one][other], ends[other][one] = MemoryLink.pair()
    return ends


class InProcess:
    """The stages of one group."""

    def __init__(
        self,
        epoch: int,
        members: Sequence[ReplicaModel],
        spans: Sequence[range],
        told: Notify,
        split: SplitPolicy = split_by_tokens,
    ) -> None:
        """`spans`: of layers, by member. A member that is there again and again is a replica of its own each time."""
        named = [int(member.name[1:]) for member in members]
        numbers = named if len({*named}) == len(named) else [*range(len(members))]
        self.group = Group(tuple(numbers), tuple(Span(span.start, span.stop) for span in spans))
        ends = all_linked(numbers)
        self.stages = []
        for number, member in zip(numbers, members, strict=True):
            over = {peer: WatchedLink(end, 0.0, bool, bool) for peer, end in ends[number].items()}
            self.stages.append(Stage(member, self.group, number, epoch, over, told, split))
        while self.stages[0].leader is None:
            assert self.stages[0].step()

    @property
    def leader(self) -> Leader:
        leader = self.stages[0].leader
        assert leader is not None
        return leader

    @property
    def followers(self) -> list[Follower]:
        return [stage.follower for stage in self.stages if stage.follower is not None]

    @property
    def caches(self) -> list[SpanCache]:
        return [stage.cache for stage in self.stages]

    def add(self, request: Request) -> None:
        self.leader.requests.add(request)

    def step(self) -> bool:
        """Each stage does what it can, the last one first. Did anything happen?"""
        return sum(stage.step() for stage in reversed(self.stages)) > 0

    def run(self, steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not self.step() and self.leader.idle:
                return
        raise AssertionError(f"after {steps} steps there are requests yet: {sorted(self.leader.requests.by_name)}")

    def drain(self) -> None:
        """Brings what is in flight to its end; nothing new is planned from now on."""
        self.leader.plans = False
        while not self.stages[0].drained:
            self.step()

    def hand_over(self) -> HandedOver:
        """Drains, and lets all requests go."""
        self.drain()
        leader = self.leader
        held = {name: leader.requests.held(name) for name in leader.requests.by_name}
        handed = tuple(Handed(leader.requests.release(name), tokens) for name, tokens in held.items())
        return HandedOver(self.group.members[0], self.group, handed)


class Regroup:
    """Requests of old groups go on in new ones, which serve others meanwhile. A replica may be in both."""

    def __init__(
        self, old: Sequence[InProcess], new: Sequence[InProcess], home: Callable[[Request], int], most: int
    ) -> None:
        """`home`: which of the new groups a request goes to; `most`: blocks of a piece."""
        self.damaged = list[tuple[int, str]]()
        lost = self.damaged  # not of this object: it would refer to itself, and go later than its last reference
        told = [group.hand_over() for group in old]
        homes = {handed.request.name: new[home(handed.request)].group for one in told for handed in one.requests}
        self._handed, self._taken = {*homes}, set[str]()
        had = {n: stage.cache for group in old for n, stage in zip(group.group.members, group.stages, strict=True)}
        gets = {n: stage for group in new for n, stage in zip(group.group.members, group.stages, strict=True)}
        ends = all_linked({**had, **gets})
        leaders = frozenset(handed_over.leader for handed_over in told)
        self._leaders = [stage.leader for stage in gets.values() if stage.leader is not None]

        def damaged(member: int, name: str) -> None:
            """Computes a damaged request anew where it is, as the supervisor would."""
            lost.append((member, name))
            leader = gets[homes[name].members[0]].leader
            assert leader is not None
            leader.requests.add(
                next(handed.request for one in told for handed in one.requests if handed.request.name == name)
            )

        self.parts = {
            n: Handover(Regrouping(n, homes.__getitem__, ends[n], leaders), had.get(n), stage, damaged, most)
            for n, stage in gets.items()
        }
        for part in self.parts.values():
            for one in told:
                part.take_in(one)

    @property
    def left(self) -> int:
        """Requests that have not gone over."""
        return len(self._handed - self._taken)

    def step(self) -> bool:
        """Each replica sends a piece and takes in what has come. False once all is done."""
        happened = sum(part.step() for part in self.parts.values()) > 0
        self._taken.update(name for leader in self._leaders for name in leader.requests.by_name)
        return happened

    def run(self) -> None:
        while self.step():
            pass
        assert all(part.complete for part in self.parts.values())

    def cancel(self, request: str) -> None:
        for part in self.parts.values():
            part.cancel(request)


PAGE = 65536
BLOCK = 16  # tokens
CHUNK = 32  # new tokens of an iteration


def install(pages: int = 1024) -> None:
    ballonet.install(pages * PAGE, page_size=PAGE, host_budget=pages * PAGE, device="cpu")


def evenly(layers: int, stages: int) -> list[range]:
    ends = [layers * n // stages for n in range(stages + 1)]
    return [range(*bounds) for bounds in itertools.pairwise(ends)]


def chosen(*tokens: int) -> tuple[ChosenToken, ...]:
    """Tokens without logprobs."""
    return tuple(map(ChosenToken, tokens))


class Told:
    """What a leader tells: the tokens of every request, that it is over, or its error."""

    def __init__(self) -> None:
        self.tokens: dict[str, tuple[ChosenToken, ...]] = {}
        self.over: set[str] = set()
        self.errors: dict[str, Exception] = {}

    def __call__(self, request: Request, error: Exception | None) -> None:
        assert request.name not in self.over, f"{request.name} was over"
        if error is not None:
            self.errors[request.name] = error
            return
        before = self.tokens.get(request.name, ())
        assert request.delivered[:-1] == before, f"{request.name} has lost or repeated a token"
        self.tokens[request.name] = request.delivered
        if request.over:
            self.over.add(request.name)

    def answers(self, requests: Sequence[Request]) -> list[list[int]]:
        assert not self.errors
        assert {request.name for request in requests} <= self.over
        return [[token.token for token in self.tokens[request.name]] for request in requests]


def hollow(model: Any, layers: range) -> Any:
    """A copy of a model that computes nothing but NaN in all layers but these."""
    copied = copy.deepcopy(model)
    for number, layer in enumerate(decoder_layers(copied)):
        if number not in layers:
            for parameter in layer.parameters():
                torch.nn.init.constant_(parameter, torch.nan)
    return copied


class Replicas:
    """Managed models, each of which is a replica, until it is left."""

    def __init__(self, models: Sequence[Any], grammars: Grammars | None = None, **batching: Any) -> None:
        self._models = models
        self._grammars = grammars or Grammars(None, (), 0)
        self._batching = {"page_size": BLOCK, **batching}
        self._stack = ExitStack()

    def __enter__(self) -> list[ReplicaModel]:
        for model in self._models:
            self._stack.enter_context(ballonet.manage(model))
        splices = [self._stack.enter_context(Splice(model)) for model in self._models]
        return [
            ReplicaModel(f"r{n}", model, splice, GroupSettings.of(model, CHUNK, **self._batching), None, self._grammars)
            for n, (model, splice) in enumerate(zip(self._models, splices, strict=True))
        ]

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def requests(asked: Sequence[Sequence[int]], new: int = 12, sampling: Sampling | None = None) -> list[Request]:
    """A request for each prompt, named by its number; a seed of its own for each."""
    made = []
    for n, ids in enumerate(asked):
        given = Sampling() if sampling is None else structs.replace(sampling, seed=n)
        made.append(Request(f"q{n}", tuple(ids), new, given))
    return made


def answered(
    model: Any,
    asked: Sequence[Request],
    stages: int,
    *,
    split: SplitPolicy = split_by_tokens,
    broken: bool = True,
    grammars: Grammars | None = None,
) -> list[list[int]]:
    """What a group of copies of a model answers; `broken`: each copy can compute its own span alone."""
    spans, told = evenly(model.config.num_hidden_layers, stages), Told()
    models = [hollow(model, layers) if broken else copy.deepcopy(model) for layers in spans]
    with Replicas(models, grammars) as members:
        group = InProcess(1, members, spans, told, split)
        for request in asked:
            group.add(request)
        group.run()
        assert all(not follower.held for follower in group.followers)
    return told.answers(asked)


class GroupSink:
    """A RequestSink in front of a group, in the place of a supervisor and replicas."""

    failed: str | None = None
    waiting = 0

    def __init__(self, group: Callable[[Notify], InProcess], config: Any, ends: tuple[int, ...]) -> None:
        self.engine = FleetEngine(self, config, 64, ends)
        self.group = group(self._deliver)

    def submit(self, request: Request) -> None:
        try:
            self.group.add(request)
        except (BallonetError, GrammarRefused) as error:
            self._deliver(request, error)

    def cancel(self, name: str) -> None:
        self.group.leader.requests.cancel(name)

    def end_requests(self) -> None: ...

    def _deliver(self, request: Request, error: Exception | None) -> None:
        self.engine.deliver(request, None if error is None else f"{type(error).__name__}: {error}")


def in_a_group(
    model: Any,
    scene: Callable[[FleetEngine, InProcess], Awaitable[None]],
    stages: int,
    tokenizer: Any = None,
    ends: tuple[int, ...] = (),
) -> None:
    """Runs a scene with a group of copies of a model behind a FleetEngine, as `in_a_loop` does with a loop."""
    spans = evenly(model.config.num_hidden_layers, stages)

    async def run(members: Sequence[ReplicaModel]) -> None:
        sink = GroupSink(lambda told: InProcess(1, members, spans, told), model.config, ends)

        async def steps() -> None:
            while True:
                sink.group.step()
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(scene(sink.engine, sink.group)), asyncio.ensure_future(steps())]
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks[1].cancel()
        del sink.group  # it refers to what refers to it
        for task in ended:
            await task

    with Replicas([hollow(model, layers) for layers in spans], Grammars(tokenizer, ends, VOCABULARY)) as members:
        asyncio.run(run(members))


class Desk:
    """A SupervisorChannel. `said`: what it says; `late`: the same, while the replica waits for something else."""

    def __init__(self) -> None:
        self.said: deque[Message] = deque()
        self.late: deque[Message | None] = deque()  # one at each look; None: nothing comes
        self.heard: list[Message] = []
        self.posted: list[tuple[Message, ...]] = []  # the same, as they came

    def take(self) -> Message | None:
        return self.said.popleft() if self.said else None

    def has(self) -> bool:
        return bool(self.said)

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        if self.late and (came := self.late.popleft()) is not None:
            self.said.append(came)
        return any(isinstance(message, kinds) for message in self.said)

    def post(self, *messages: Message) -> None:
        self.heard += messages
        self.posted.append(messages)
