"""Whether a model fits under the budget: checked before anything is moved, so that the error names a budget that would
be enough.

Note [Working pages]
    Beside its weights a model needs its KV cache and its activations. The check asks for what a short `generate()`
    takes, of a few tokens of one sequence. The cache: a token of a layer is at most two hidden states wide, layers
    share pages that would be mostly empty (geometry.choose), so pages are at least half full, but for the last. The
    activations: two float32 copies of the widest, as a rule the logits, which are as wide as the largest dimension of
    any weight, and a few pages for the allocator's small blocks. A longer prompt or a larger batch needs more, and
    raises torch.OutOfMemoryError where there is no more.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...allocator._native import Device
from ...allocator.errors import BudgetError, ManageError
from ...allocator.units import format_size
from ...offload.policy.layout import Layout
from ...offload.policy.plan import Plan, Rule
from ...offload.policy.reclaim_order import Rung
from ...offload.policy.tuning import DEFAULT, WeightPlans
from ..device import governors
from ..device.governors import give_up
from ..device.shared import reserve
from .model_parts import TensorSpan, text_config

_LOGITS = 2 * 4  # bytes per element: two copies in float32


def working_pages(
    model: nn.Module, layers: Sequence[nn.Module], page_size: int, plans: WeightPlans = DEFAULT.weights
) -> int:
    """Pages that a short use of `model` takes beside its weights; see Note [Working pages]."""
    widest = max((size for parameter in model.parameters() for size in parameter.shape), default=1)
    itemsize = max((parameter.itemsize for parameter in model.parameters()), default=1)
    configs = map(text_config, model.modules())
    hidden = next((config.hidden_size for config in configs if hasattr(config, "hidden_size")), 1)
    token = 2 * itemsize * hidden  # bytes of one layer's keys and values
    cache = -(-2 * len(layers) * plans.short_use * token // page_size) + 1
    return cache + -(-plans.short_use * widest * _LOGITS // page_size) + plans.small_blocks


def plan_under_budget(
    device: Device, layout: Layout, spans: Sequence[TensorSpan], working: int, layers: int, rule: Rule
) -> Plan:
    """Chooses which of the `layers` decoder layers stream, so that the model of `spans` can be moved in and used under
    the device's budget. Idle models give pages for all of it, others only for the least that it needs. BudgetError
    where it does not fit.

    Sources that are blocks of the pool are not counted as used by others: each is freed once it is copied.
    """
    device.trim()
    page = device.page_size
    sources = sum(span.nbytes for span in spans if any(map(device.block_size, span.bases()))) // page
    pages = layout.layer_pages(layers)
    own = layout.pages - sum(pages) + layout.spare(sources=sources > 0, working=working)

    def missing(wanted: int) -> int:
        """Pages that lack where layers take `wanted` pages."""
        return max(0, _used(device) - sources) + own + wanted - device.budget // page

    reserve(device, missing(sum(pages)))
    if (lack := missing(sum(pages))) > 0:
        give_up(device, lack)  # prefixes that are only kept for later prompts
        if (lack := missing(sum(pages))) > 0:
            governors.of(device).ladder.make_room(lack, Rung.IDLE_KV)
    if (lack := missing(rule.smallest(pages))) > 0:
        governors.of(device).ladder.make_room(lack, Rung.LAST_WEIGHTS)
    total, others = device.budget // page, max(0, _used(device) - sources)
    fixed = others + own
    plan = rule.choose(pages, total - fixed)
    if plan is None or fixed + plan.device_pages > total:
        smallest = (fixed + rule.smallest(pages)) * page
        raise BudgetError(layout.pages * page, device.budget, smallest, others * page)
    return plan


def _used(device: Device) -> int:
    """Pages of all owners."""
    device.reap(wait=True)
    pages: dict[str, int] = device.snapshot()["pages"]
    return sum(count for owner, count in pages.items() if owner != "free")


def check_host(device: Device, pages: int) -> None:
    """Raises ManageError where there are not so many host pages for weights."""
    left = host_pages_left(device)
    if pages and device.host_refused:
        raise ManageError(
            f"layers cannot stream from host pages here: {device.host_refused}. Give a larger budget for the device; a "
            "model that ballonet.from_pretrained() loads from safetensors needs no host pages"
        )
    if pages > left:
        page = device.page_size
        raise ManageError(
            f"the layers that stream need {format_size(pages * page)} of host pages, and "
            f"{format_size(left * page)} are left: give a larger host budget (ballonet.install(host_budget=...), or "
            "BALLONET_HOST_BUDGET), or a larger budget for the device; a model that ballonet.from_pretrained() loads "
            "from safetensors needs none"
        )


def host_pages_left(device: Device) -> int:
    """Host pages that are left; 0 where the driver cannot map them at a device address."""
    snapshot = device.snapshot()
    used = snapshot["host_pages"] - snapshot["host_free"]
    left: int = snapshot["host_budget"] // device.page_size - used
    return left if device.host_pages else 0
