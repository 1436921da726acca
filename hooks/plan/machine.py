"""The simulated machine, the models on it, which compute nothing while each step takes the time of a cost model, and
their requests.

Note [Scale]
    Pages are real memory of this machine, which usually has less than the simulated one. So one byte here stands for
    `scale` bytes there: the budget, pages, weights, and KV and activations of a token are all so much smaller, their
    numbers the same, and the link takes the same time for each. Time is not scaled. The tables and indices of a batch
    do not shrink, so the admission counts `scale` times too much for them, about 0.1 % of a budget.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ...allocator.errors import ManageError
from ...allocator.units import format_size
from ...offload.policy.step_costs import Parts, Step
from ...offload.record.record import Point, Record
from ..profile import Grid
from ..server.load import RecordedArrival
from ..weights.model_parts import decoder_layers


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated machine. Bytes: `budget` of the device, `host_budget`, `page_size`; `link`: bytes per second
    between host and device. `scale`: see Note [Scale]. ManageError where the page cannot be scaled."""

    budget: int
    host_budget: int
    page_size: int
    link: float
    scale: int = 1

    def __post_init__(self) -> None:
        """Raises ManageError where the page cannot be scaled."""
        if self.scale < 1 or self.page_size % (self.scale * 4096):
            raise ManageError(
                f"a page of {format_size(self.page_size)} cannot be {self.scale} times smaller here: it has to be a "
                "multiple of 4096 bytes then; give a larger page or a smaller scale"
            )

    @property
    def here(self) -> Machine:
        """The scaled machine, in bytes of this one."""
        pages = self.budget // self.page_size, self.host_budget // self.page_size
        page = self.page_size // self.scale
        return Machine(pages[0] * page, pages[1] * page, page, self.link / self.scale)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model: its configuration, the costs of its steps on the simulated machine, and its requests."""

    name: str
    config: Any
    costs: Parts
    arrivals: Sequence[RecordedArrival]

    def record(self, machine: Machine, grid: Grid) -> Record:
        """Returns the record that a measurement of the model's iterations would make."""
        seconds = {}
        for batch, length in grid.sizes():
            seconds[Point("decode", batch, length)] = self.costs.seconds(Step(batch, batch * (length + 1)))
            seconds[Point("prefill", batch, length)] = self.costs.seconds(Step(batch * length, batch * length))
        return Record({}, machine.link, seconds)


@dataclass(frozen=True, slots=True)
class MachineSizes:
    """Bytes of a model's weights: of each decoder layer, and of the rest."""

    layers: tuple[int, ...]
    rest: int

    @classmethod
    def of(cls, config: Any) -> MachineSizes:
        """Returns the sizes of a model with this configuration, in its own dtype."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        layers = tuple(sum(parameter.nbytes for parameter in layer.parameters()) for layer in decoder_layers(model))
        return cls(layers, sum(parameter.nbytes for parameter in model.parameters()) - sum(layers))

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return sum(self.layers) + self.rest


def costs_of(path: Path) -> Parts:
    """Returns the cost model in a JSON file: seconds of `fixed`, `row`, `key`, `pair`. ManageError where it is none."""
    try:
        parts = Parts(**json.loads(path.read_text()))
        if not all(isinstance(seconds, int | float) and seconds >= 0 for seconds in asdict(parts).values()):
            raise ValueError("a part is not a number of seconds")
        if parts.fixed + parts.row + parts.key + parts.pair <= 0:
            raise ValueError("all parts are 0, so that no time would pass")
    except (OSError, ValueError, TypeError) as error:
        raise ManageError(f"{path} is no cost model of fixed, row, key and pair: {error}") from None
    return parts


def dealt(arrivals: Sequence[RecordedArrival], models: int, turn: float | None = None) -> list[list[RecordedArrival]]:
    """Returns the requests of each of so many models, dealt one by one; or, with `turn`, all requests of `turn` seconds
    to one model, then to the next."""
    queues: list[list[RecordedArrival]] = [[] for _ in range(models)]
    for number, arrival in enumerate(arrivals):
        queues[(number if turn is None else int(arrival.at / turn)) % models].append(arrival)
    return queues


def smaller(config: Any, scale: int) -> Any:
    """Scales a text configuration in place, so that KV and activations are `scale` times smaller, and returns it.
    ManageError where heads cannot be scaled."""
    text = config.get_text_config()
    if scale > 1:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if head % scale or text.hidden_size % scale:
            raise ManageError(f"heads of {head} elements cannot be {scale} times smaller: give a scale that divides it")
        text.head_dim, text.hidden_size = head // scale, text.hidden_size // scale
    return text


def checked(tenants: Sequence[Tenant], machine: Machine) -> None:
    """Raises ManageError where there is no request, or a model does not fit even alone."""
    for tenant in tenants:
        weights = MachineSizes.of(tenant.config).total
        if weights >= machine.budget:
            raise ManageError(
                f"the weights of {tenant.name} have {format_size(weights)}, and the budget is "
                f"{format_size(machine.budget)}: give more"
            )
    if not any(tenant.arrivals for tenant in tenants):
        raise ManageError("there are no requests")


class Clock:
    """A virtual clock: `now`, in seconds, is set by the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualModel(PreTrainedModel, GenerationMixin):
    """A causal language model whose next token is always 0. `step`: called in each forward."""

    _supports_flash_attn = _supports_sdpa = True
    main_input_name = "input_ids"
    step: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def of(cls, tenant: Tenant, machine: Machine, weights: bool = True) -> VirtualModel:
        """Returns a model with the layers and heads of the tenant's. `weights`: as large as the tenant's, all 0; else
        next to none. Without attention masks, as the costs include pairs. ManageError."""
        sizes = MachineSizes.of(tenant.config) if weights else MachineSizes((), 0)
        text = smaller(copy.deepcopy(tenant.config), machine.scale)
        text.vocab_size = 1
        text._attn_implementation = "eager"
        dtype = text.dtype or torch.float32
        model = cls(text, [_elements(layer, machine.scale, dtype) for layer in (*sizes.layers, sizes.rest)], dtype)
        text._attn_implementation_internal = "paged|flash_attention_2"  # whose batches have no masks; none is called
        model.generation_config = GenerationConfig()
        return model

    def __init__(self, config: Any, layers: list[int], dtype: torch.dtype) -> None:
        """`layers`: elements of the weights of each, and then of the rest."""
        super().__init__(config)
        *sizes, rest = layers
        self.layers = nn.ModuleList(_Layer(elements, dtype) for elements in sizes)
        self.rest = _weight(rest, dtype)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Calls `step`, and returns logits [1, tokens, 1] of 0."""
        self.step()
        return _Output(torch.zeros(1, input_ids.shape[1], 1))


class _Layer(nn.Module):
    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(elements, dtype)


class _Output:
    """A model output with the attributes that transformers reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def _weight(elements: int, dtype: torch.dtype) -> nn.Parameter:
    """Returns a square weight, as activations are estimated from the widest weight."""
    side = max(1, math.isqrt(elements))
    return nn.Parameter(torch.zeros(-(-elements // side), side, dtype=dtype), requires_grad=False)


def _elements(nbytes: int, scale: int, dtype: torch.dtype) -> int:
    return max(1, nbytes // (scale * dtype.itemsize))
