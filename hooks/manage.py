"""`manage()`: its checks, and the order of its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from ..allocator import devices, install, looks
from ..allocator.devices import Runtime
from ..allocator.errors import AlreadyManaged, ForkedProcess, ManageError, OptionError
from ..allocator.units import format_size
from ..offload.policy.plan import Fewest, Interval, Rule
from ..offload.policy.tuning import Tuning
from ..offload.record.record import Record
from ..offload.timeline.recorder import mark
from .device import governors, shared, streams
from .forward.gate import Gate
from .managed import Managed, lock, managed_as, models
from .options import ManageOptions, check_known, given
from .weights.model_parts import decoder_layers
from .weights.ranges import Files

if TYPE_CHECKING:
    from .profile import Grid

NO_KEYWORDS: Final[Mapping[str, object]] = {}


def manage(
    model: nn.Module,
    *,
    interval: int | Literal["auto"] | None = "auto",
    tpot_slo: float | str | None = None,
    ttft_slo: float | str | None = None,
    priority: int = 0,
    floor: int | str = 0,
    prefix_cache: bool | int | str | None = None,
    prefix_dir: str | os.PathLike[str] | None = None,
    prefix_dir_limit: int | str | None = None,
    shared_budget: int | str | bool | None = None,
    batches: str = "fast",
    pieces: Literal["auto"] | None = "auto",
    **unknown: object,
) -> Managed:
    """Moves the weights of `model` into the pool and hooks it; `generate()` then uses the elastic KV cache. Undone by
    `release()`.

    Any module is accepted. Each decoder layer of a transformers model gets a range of its own; other modules are
    resident as a whole. Use a model whose layers stream under `torch.no_grad()`, as `generate()` does, or it is slow.

    Options; sizes are bytes or a text such as "8GiB", times are seconds or a text such as "80ms":

    `interval`: of every so many decoder layers the last streams from the host (Select-N §4.3). "auto": as few as the
        budget demands, as a rule none; their pages serve KV caches and are taken back (Oneiros §5). None: no layer.
    `tpot_slo`, `ttft_slo`: the longest decode step and prefill. "auto" then streams as many layers as they allow
        (Select-N §4.5). Measures iterations first, unless this machine has a record. Also the default SLO of each
        batched request, whose `ttft_slo` counts from its arrival.
    `priority`: models with the lowest give pages first, of weights and KV caches.
    `floor`: device memory that its weights and caches keep together in any case.
    `prefix_cache`: True, or a size: keep computed tokens, so that later prompts compute only the rest, see
        `Managed.prefixes`.
    `prefix_dir`: a folder that keeps them for later processes too, written in the background. Implies `prefix_cache`.
        Its files are as private as the prompts.
    `prefix_dir_limit`: the size of that folder, 16 GiB by default; the least recently used files go first.
    `shared_budget`: device memory shared with other processes of this user, used by those that need it; True: the size
        that they have set.
    `batches`: of `generate_batch()` and the server. "fast": as many requests in a step as give the most tokens per
        second, once measured. "full": as many as fit.
    `pieces`: "auto": decodes by pieces of CUDA graphs, to the same bits as eager code. None: by eager code.

    The environment sets options that have their defaults here: BALLONET_ and the name in capitals (BALLONET_TPOT_SLO).

    Calls `ballonet.install()` with its defaults if that was not done. A second call for the same model, with the same
    options or none, returns the same Managed.

    The model may be changed in every way that torch and transformers allow. New tensors (converted, assigned, resized
    weights, adapters, layers) are moved into the pool at its next forward; those that cannot be are in
    `Managed.report().unmanaged_tensors`. Copies of the model are not managed. Views of weights that were taken before
    keep the old memory, as with `Module.to`. A failure changes nothing. Call it while no other thread runs the model;
    forwards that begin meanwhile wait (gate.py).

    Raises ManageError (OptionError, AlreadyManaged, WrongDevice, ModelInUse where this is called within a
    forward, SLOError: with the nearest SLO and budget that would do), BudgetError,
    torch.OutOfMemoryError, DriverError, and the errors of `install()`.
    """
    keywords = given(locals())  # the table of options says which names of these count
    check_known(unknown, "manage")
    return managed(model, ManageOptions.of(keywords), repeated=keywords)


def managed(
    model: nn.Module,
    options: ManageOptions,
    *,
    repeated: Mapping[str, object] = NO_KEYWORDS,
    files: Files | None = None,
    progress: Callable[[int], object] = int,
    on: Runtime | None = None,
    grid: Grid | None = None,
    record: Record | None = None,
) -> Managed:
    """Manages a model with parsed options. `repeated`: options that must not differ where the model is managed already.
    `files`: for a model on the CPU that was just loaded and is to move to the device: tensors that lie in files byte
    for byte, which are read from there. `progress` is called with bytes as they arrive. `on`: the runtime, by default
    the installed one. `grid`: points to measure in any case. `record`: of its iterations, if known."""
    if not isinstance(model, nn.Module):
        raise ManageError(f"manage() takes a torch.nn.Module, not {type(model).__name__}")
    started = on or devices.current()
    if started is not None and started.process != os.getpid():
        raise ForkedProcess("manage() was called")
    composed = governors.composed_with(None if started is None else started.device)
    rule = _rule(model, options, composed.tuning)

    def known() -> Managed | None:
        """Returns the model's Managed, if it has the same options. AlreadyManaged."""
        earlier = managed_as(model)
        if earlier is not None and all(getattr(earlier._options, name) == value for name, value in repeated.items()):
            return earlier
        _check_not_managed(model)
        return None

    with lock:
        if (handle := known()) is not None:
            return handle
    composed.interpreter.check()
    gate = Gate(model)
    with gate.closed():
        gate.check_outside()
        with lock:
            if (handle := known()) is not None:
                return handle
            if on is None and devices.current() is None:
                install.install()
            found_on = on or devices.of()
            device = found_on.device
            looks.publish(found_on, "models", _published)
            if options.shared_budget is not None:
                shared.join(found_on, options.shared_budget, options.floor, options.priority, composed.tuning.sharing)
            if options.floor > shared.reach(device):
                raise OptionError(
                    f"floor is {format_size(options.floor)}, which the budget of {format_size(device.budget)} does not "
                    "have: give less, or raise the budget with ballonet.set_budget()"
                )
            mark("manage()", device)
            streams.wait_for_work(device)
            made = Managed(model, gate, device, rule, options, files, progress)
            models[model] = made
            if (seed := found_on.settings.chaos) is not None:  # of tests alone, so its module comes only then
                import_module("ballonet.testing").move_pages(made, seed)
        try:
            streams.wait_for_work(device)  # other threads run it on other streams
            made._govern(grid, record)
        except BaseException:
            if files is None:
                made.release()
            else:  # it may be larger than torch's memory, and was not handed out yet
                made._let_go()
            raise
    return made


def _rule(model: nn.Module, options: ManageOptions, tuning: Tuning) -> Rule:
    """Returns which layers stream at first. OptionError where it lacks the layers that the options need."""
    layers = len(decoder_layers(model))
    if options.slo and not layers:
        raise OptionError(
            f"{type(model).__name__} has no decoder layers that could stream: manage it without tpot_slo and ttft_slo"
        )
    if options.interval == "auto":
        return Fewest(slots=tuning.weights.slots)
    if options.interval is not None and options.interval > layers:
        raise OptionError(
            f"interval is {options.interval}: give a whole number from 1 (all layers stream) to {layers}, the number "
            f'of decoder layers of {type(model).__name__}, or "auto", or None'
        )
    return Interval(options.interval)


def _check_not_managed(model: nn.Module) -> None:
    parts = {id(module) for module in model.modules()}
    for other in list(models):
        if other is model:
            raise AlreadyManaged(
                f"this {type(model).__name__} is managed already: release() what manage() returned first"
            )
        if any(id(module) in parts for module in other.modules()):
            raise AlreadyManaged(
                f"{type(model).__name__} has a part in common with a {type(other).__name__} that is managed already: "
                "manage the one that contains both, or release() the other first"
            )


def _published(on: Runtime) -> list[dict[str, Any]]:
    """Returns, for `top` and metrics, the facts of each managed model of the device, in the order of managing."""
    from .watch.facts import model_facts, with_names

    facts = list[dict[str, Any]]()
    for known in models.keyrefs():  # a list of its own: other threads manage and release meanwhile
        model = known()
        handle = None if model is None else models.get(model)
        if model is not None and handle is not None and handle._weights.device is on.device:
            facts.append(model_facts(model, handle._residency, handle._weights, handle._prefixes))
    return with_names(facts)
