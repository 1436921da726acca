"""What `manage()` attaches to a model that generates: the elastic cache, continuous batching, cached sequences."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ..allocator import devices
from ..allocator._native import Device
from ..offload.manager.client import PageClient
from ..offload.manager.decision import Lendable
from ..offload.policy.step_costs import RequestSLO, StepCosts
from .device import managers
from .forward.lease import ForwardLease
from .options import ManageOptions
from .streaming.model_residency import ModelResidency

if TYPE_CHECKING:
    from .forward.forwards import Forwards
    from .measure.pace import Pace
    from .pieces.runner import PieceRunner
    from .prefix.store import PrefixStore


def generators(model: nn.Module) -> list[nn.Module]:
    """The parts of `model` that generate text as transformers does: as a rule the model alone. Some have such a model
    inside and call only that."""
    transformers = sys.modules.get("transformers.generation.utils")
    if transformers is None:
        return []
    return [module for module in model.modules() if isinstance(module, transformers.GenerationMixin)]


def nothing() -> None:
    """Undoes nothing, for a model without caches."""


def attach_prefixes(
    model: nn.Module, device: Device, options: ManageOptions, residency: ModelResidency
) -> tuple[PrefixStore, Callable[[], object]]:
    """Keeps the tokens of its `generate()` calls for later prompts. Returns (the store, the function that undoes
    it)."""
    from .batching import patches
    from .prefix import sessions
    from .prefix.store import PrefixStore

    size = options.kept_prefixes
    store = PrefixStore(model, device, None if size is True else size, managers.of(device), residency)
    residency.keeper = weakref.ref(store.contents)
    if (folder := options.prefix_dir) is not None:
        from .prefix.saving import Saver

        record, manager, limit = (lambda: residency.timings.record), managers.of(device), options.prefix_dir_limit
        store.contents.saver = Saver(model, device, folder, limit, store, manager, record)
    if (batched := patches.batched(model)) is not None and batched.loop_caches is not None:
        batched.loop_caches.share(store)
    detach = sessions.attach(model, store)

    def undo() -> None:
        detach()
        store.close()

    return store, undo


def why_no_pieces(model: nn.Module, device: Device, options: ManageOptions) -> str | None:
    """Returns why no forward of the model runs as pieces of CUDA graphs; empty where it is tried, None where the device
    has no graphs."""
    if device.kind != "cuda":
        return None
    if options.pieces is None:
        return "turned off (pieces, BALLONET_PIECES)"
    if why := devices.holding(device).why_no_graphs:
        return why
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return "its decoder reads the encoder's keys past the cache" if encodes else ""


def attach_pieces(
    model: nn.Module,
    device: Device,
    options: ManageOptions,
    residency: ModelResidency,
    forwards: Forwards,
    pace: Pace,
) -> tuple[PieceRunner | None, Callable[[], object]]:
    """Makes forwards of the model within `generate()` run as pieces of CUDA graphs, where there are any, and keeps
    cuDNN's attention off. Returns (what runs them, the function that undoes it)."""
    if why_no_pieces(model, device, options) != "":
        return None, nothing
    from .pieces import calls
    from .pieces.runner import PieceRunner

    streaming, rest, local_layers = residency.streaming, residency.rest, forwards.local_layers
    runner = PieceRunner(
        model,
        device,
        managers.of(device),
        lambda: streaming.bound if local_layers.span is None and not rest.on_host else None,
        forwards.between_layers,
        pace,
        options.priority,
    )
    restore = calls.keep_off(model)
    detach = calls.attach(model, runner)

    def undo() -> None:
        detach()
        restore()

    return runner, undo


class Attached(NamedTuple):
    """What `attach_caches` has attached: `lease` makes the lease of a forward of the model, `wanted` returns the time
    until which batched requests need it, `calls` the number of its calls of `generate()` that run, on any thread,
    `caches` the clients of the pages of batches, with their numbers; `undo` undoes all."""

    lease: Callable[[], ForwardLease] = ForwardLease
    wanted: Callable[[], float | None] = nothing
    calls: Callable[[], int] = int
    caches: Callable[[], list[tuple[int, PageClient]]] = list
    undo: Callable[[], object] = nothing


def attach_caches(
    model: nn.Module, device: Device, options: ManageOptions, residency: Callable[[], ModelResidency | None]
) -> Attached:
    """Makes the caches that the model builds elastic. `device`: of the caches. `residency`: returns the model's, None
    once it is collected. Where prefixes are kept, caches may grow for a long time, so layers share no pages."""
    from .batching import patches
    from .batching.batched import Batched, LoopCaches
    from .compat import position_table
    from .device.references import label
    from .kv import generation

    def require(tpot: float | None, ttft: float | None, others: bool) -> None:
        if (it := residency()) is not None:
            it.require(tpot, ttft, others)

    def lends(pages: int) -> Lendable:
        it = residency()
        return Lendable(0, 0, 0) if it is None else manager.lending(it, pages)

    loop_caches = LoopCaches() if options.kept_prefixes else None
    detach_caches = generation.attach(model, device, alone=bool(options.kept_prefixes))
    slo = RequestSLO(options.ttft_slo, options.tpot_slo)
    manager = managers.of(device)

    def assumed() -> tuple[float, float]:
        page, behind = manager.link.page_seconds or 0.0, manager.marks is not None  # is the device behind the host?
        exposed = 0.0 if behind else manager.tuning.serving.exposed
        return exposed * page, (1 - exposed) * page

    costs = StepCosts(manager.tuning.serving, assumed)
    fast, positions = options.batches == "fast", position_table(model)
    batched = Batched(label(model), device, costs, fast, require, lends, residency, loop_caches, slo, positions)
    detach_batches = patches.attach(model, batched)

    calls, detach_calls = generation.count_calls(model)

    def detach() -> None:
        detach_calls()
        detach_caches()
        detach_batches()

    def caches() -> list[tuple[int, PageClient]]:
        return [(client.number, client) for client in list(batched.clients)]

    lease = partial(generation.ModelLease, weakref.ref(model))
    return Attached(lease, lambda: batched.wanted, calls, caches, detach)
