"""What recorded requests would meet: the scheduler, the cache and the pages of this library, and a clock that only a
cost model moves. Time is simulated, pages are real.

Note [What is real]
    Requests go through transformers' own loop, ballonet's scheduler, admission, preemption and cache, and pages of the
    stand-in are mapped, moved to the host and given back as they would be. But no layer computes: a step takes what
    `Parts` says of its new tokens and of those that it reads (step_costs.py), and each answer has as many tokens as
    were recorded. Weights are a part of the budget that is not there: they neither lend pages nor stream.

Note [Stock]
    For comparison the same requests go through transformers' own cache and scheduler, whose cache is as large as stock
    makes it in what the weights leave of the budget.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...allocator import install, runtime
from ...allocator.errors import ManageError
from ...offload.policy.step_costs import Parts, Step
from ...offload.policy.tuning import DEFAULT
from ..batching import seams
from ..device import governors
from ..managed import managed
from ..options import ManageOptions
from .arrivals import BLOCK, Arrival
from .load import Answered, summary

Policy = Literal["stock", "full", "fast"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)


@dataclass(frozen=True)
class Machine:
    """What there is: bytes of the device and of the host, bytes of a page and of the weights, and what steps take."""

    budget: int
    host_budget: int
    page_size: int
    weights: int
    costs: Parts


def costs_of(path: Path) -> Parts:
    """The cost model in a file: seconds by part, as JSON. ManageError where it is none; OSError."""
    try:
        parts = Parts(**json.loads(path.read_text()))
        if not all(isinstance(each, int | float) and each >= 0 for each in asdict(parts).values()):
            raise ValueError("a part is not a number of seconds")
        if parts.fixed + parts.row + parts.key + parts.pair <= 0:
            raise ValueError("all parts are 0, so that no time would pass")
    except (ValueError, TypeError) as error:
        raise ManageError(f"{path} is no cost model of fixed, row, key and pair: {error}") from None
    return parts


def run(
    arrivals: Sequence[Arrival],
    config: Any,
    machine: Machine,
    policy: Policy,
    batching: dict[str, Any],
    slos: tuple[float | None, float | None] = (None, None),
    note: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Returns the figures of `load`, and `policy`, `steps` and `kv_bytes`, at the most (0 of stock's, which are fixed).
    `config`: of a causal language model of transformers; `batching`: what ContinuousBatchingConfig takes; `slos`:
    seconds to the first token, and of one, for the goodput; `note`: is called with the number of requests that have
    ended. ManageError."""
    clock = _Clock()
    model = _Pretending.of(config, machine.costs, clock)
    if policy == "stock":
        with _sized(machine):
            return _Run(model, clock, machine, batching, slos, note).of(arrivals, policy)
    before = governors.compose_with(governors.composed_with()._replace(clock=clock))
    try:
        install.install(
            machine.budget - machine.weights,
            page_size=machine.page_size,
            host_budget=machine.host_budget,
            device="cpu",
        )
        try:
            runtime.require().stop_background()
            handle = managed(model, ManageOptions(batches=policy))
            try:
                return _Run(model, clock, machine, batching, slos, note).of(arrivals, policy)
            finally:
                handle.release()
        finally:
            install.restore()
    finally:
        governors.compose_with(before)


def measured(
    name: str, arrivals: Sequence[Arrival], budget: int, host_budget: int, page_size: int, batching: dict[str, Any]
) -> tuple[Parts, float]:
    """Loads a model, answers a few requests like those with it, in batches as large as there is room for, and returns
    what its steps took, and the error of that: a part of the time. ManageError where too few steps ran; OSError,
    torch.OutOfMemoryError."""
    from transformers import AutoModelForCausalLM

    tuning = DEFAULT.serving
    install.install(budget, page_size=page_size, host_budget=host_budget)
    try:
        ordinal, kind = runtime.require().ordinal, runtime.require().kind
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        model = model.to(f"cuda:{ordinal}" if kind == "cuda" else "cpu").eval()
        handle = managed(model, ManageOptions(batches="full"))
        try:
            draw = random.Random(0)
            highest = model.config.get_text_config().vocab_size
            settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
            with model.continuous_batching_context_manager(
                generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**batching)
            ) as manager:
                asked = arrivals[: tuning.sample]
                for each in asked:
                    prompt = [draw.randrange(highest) for _ in range(min(each.prompt, tuning.prompt))]
                    manager.add_request(prompt, max_new_tokens=draw.randint(2, tuning.answer))
                done = 0
                while done < len(asked) and manager.is_running():
                    done += manager.get_result(timeout=1) is not None
            found = seams.batched(model)
            parts, error = (None, None) if found is None else (found.costs.parts, found.costs.error)
        finally:
            handle.release()
    finally:
        install.restore()
    if parts is None or error is None:
        raise ManageError(f"{name}: too few steps ran to say what they take: give more requests, or --costs FILE")
    return parts, error


def weights_of(config: Any) -> int:
    """Bytes of the weights of a model with this configuration, in its own type."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    return sum(each.nbytes for each in model.parameters())


class _Clock:
    """Seconds that pass when a step is computed, or when nothing is to be done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Pretending(PreTrainedModel, GenerationMixin):
    """A model that computes nothing: each step takes its time, and the next token is always 0."""

    _supports_flash_attn = _supports_sdpa = True
    main_input_name = "input_ids"
    costs: Parts
    clock: _Clock
    step: Step

    @classmethod
    def of(cls, config: Any, costs: Parts, clock: _Clock) -> _Pretending:
        """With the layers and heads of `config`, and without masks: pairs are in the costs."""
        text = config.get_text_config()
        text.vocab_size = 1
        text._attn_implementation = "eager"
        model = cls(text)
        text._attn_implementation_internal = "flash_attention_2"  # whose batches have no masks; none is called
        model.costs, model.clock, model.step = costs, clock, Step(0, 0)
        model.generation_config = GenerationConfig()
        nn.Module.to(model, text.dtype or torch.float32)
        return model

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Logits of nothing, after what the step takes."""
        self.clock.now += self.costs.seconds(self.step)
        return _Output(torch.zeros(1, input_ids.shape[1], 1))


class _Output:
    """What transformers reads of an output."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class _Run:
    """One loop over all arrivals."""

    def __init__(
        self,
        model: _Pretending,
        clock: _Clock,
        machine: Machine,
        batching: dict[str, Any],
        slos: tuple[float | None, float | None],
        note: Callable[[int], None],
    ) -> None:
        self._model, self._clock, self._machine, self._slos, self._note = model, clock, machine, slos, note
        self._manager: Any = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(max_queue_size=0, use_cuda_graph=False, **batching),
        )
        self._answers: dict[str, Answered] = {}

    def of(self, arrivals: Sequence[Arrival], policy: Policy) -> dict[str, Any]:
        clock, manager, tuning = self._clock, self._manager, DEFAULT.serving
        processor = manager.batch_processor = manager._create_batch_processor()
        waiting, number, steps, most, idle = list(reversed(arrivals)), 0, 0, 0, 0
        page = self._machine.page_size
        while waiting or processor.has_pending_requests() or not manager.input_queue.empty():
            while waiting and waiting[-1].at <= clock.now:
                arrival = waiting.pop()
                name = str(number)
                self._answers[name] = Answered(arrival.at)
                manager.input_queue.put(_state(name, arrival, number))
                number += 1
            if policy != "stock":  # else it depends on this machine when a page is back
                runtime.require().synchronize()
                runtime.require().reap(wait=True)
            if self._prepared(processor, idle > tuning.lonely * 10):
                requests = processor.inputs_and_outputs.requests_in_batch
                self._model.step = Step.of(
                    (each.query_length, each.state.current_len() - each.query_length) for each in requests
                )
                processor._generation_step(self._model)
                processor.update_batch()
                steps, idle = steps + 1, 0
                pages = getattr(processor.cache, "pages", None)
                most = max(most, 0 if pages is None else pages.pages * page)
            else:
                clock.now = max(clock.now + tuning.look, waiting[-1].at if waiting else 0.0)
                idle = 0 if waiting else idle + 1
            self._hear()
        del processor
        manager.batch_processor = None
        found = summary(list(self._answers.values()), *self._slos)
        return {"policy": policy, **found, "steps": steps, "kv_bytes": most, "time": "simulated"}

    def _prepared(self, processor: Any, stuck: bool) -> bool:
        """Is there a batch? Where none can ever be all requests fail, as in the loop."""
        try:
            if stuck:
                raise RuntimeError("no memory for those that wait, although nothing runs")
            return bool(processor.prepare_next_batch())
        except RuntimeError as error:
            processor.fail_all_requests(error)
            return False

    def _hear(self) -> None:
        queue = self._manager.output_router.output_queue
        while not queue.empty():
            output = queue.get_nowait()
            answer = self._answers[output.request_id]
            if output.error is not None:
                answer.error, answer.ended = output.error, self._clock.now
            else:
                fresh = len(output.generated_tokens) - answer.tokens
                answer.times += [self._clock.now] * fresh
                answer.tokens += fresh
                answer.ended = self._clock.now
            if output.is_finished():
                self._note(sum(bool(each.ended) for each in self._answers.values()))


def _state(name: str, arrival: Arrival, number: int) -> Any:
    from transformers.generation.continuous_batching.requests import RequestState

    tokens = [block * BLOCK % 2**30 + n for block in arrival.blocks for n in range(BLOCK)][: arrival.prompt]
    own = 2**30 + number * 2**15 % 2**30
    tokens += [own + n % 2**15 for n in range(arrival.prompt - len(tokens))]
    return RequestState(name, tokens, streaming=True, max_new_tokens=max(1, arrival.new), eos_token_id=-1)


@contextmanager
def _sized(machine: Machine) -> Iterator[None]:
    """Stock is told that the budget is all there is, and that the weights lie in it."""
    from transformers.generation.continuous_batching import cache

    names, name = vars(cache), "get_device_and_memory_breakdown"
    found = torch.device("cpu"), machine.budget, machine.weights, machine.weights
    before, names[name] = names[name], lambda: found
    try:
        yield
    finally:
        names[name] = before
