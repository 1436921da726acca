"""`manage()`: its checks, and the order of its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import nn

from ..allocator import control, devices, install, looks
from ..allocator._native import Device
from ..allocator.devices import Runtime
from ..allocator.errors import (
    AlreadyManaged,
    BallonetError,
    BudgetError,
    ForkedProcess,
    ManageError,
    OptionError,
    PoolExhausted,
    WrongDevice,
)
from ..allocator.units import format_size
from ..offload.policy.plan import Fewest, Interval, Rule, streaming
from ..offload.policy.tuning import Tuning
from ..offload.record.record import Record
from ..offload.timeline.recorder import mark
from .device import managers, shared, streams
from .device.streams import torch_device
from .forward.gate import Gate
from .managed import Managed, lock, managed_as, models, outcomes_on, vacate
from .options import ManageOptions, check_known, given
from .pipeline import ManagedPipeline, modules_of
from .streaming.model_residency import ModelResidency
from .weights import follow
from .weights.model_parts import decoder_layers, members
from .weights.moving import bring
from .weights.ranges import FROM_CPU, NOTHING, Files, Vacated

if TYPE_CHECKING:
    from .profile import Grid

NO_KEYWORDS: Final[Mapping[str, object]] = {}


@overload
def manage(model: nn.Module, **options: Any) -> Managed: ...
@overload
def manage(model: object, **options: Any) -> ManagedPipeline: ...


def manage(
    model: Any,
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
    device: str | torch.device | None = None,
    **unknown: object,
) -> Managed | ManagedPipeline:
    """Moves the weights of `model` into the pool and hooks it; `generate()` then uses the elastic KV cache. Undone by
    `release()`.

    Any module is accepted. Each decoder layer of a transformers model, and each block of another one that has lists of
    blocks (`nn.ModuleList`, `nn.Sequential`, nested too), gets a range of its own and can stream; the rest is resident.
    Of a pipeline (diffusers', transformers') each module is managed, and a ManagedPipeline returned. Use a model whose
    layers stream under `torch.no_grad()`, as `generate()` does, or it is slow.

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
    `device`: that of the pool, for a model that lies on the CPU: it is moved there tensor by tensor, so that it may be
        larger than the budget, and goes back to the CPU with `release()`.
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
    if device is not None:
        _check_device(torch.device(device))
    options, files = ManageOptions.of(keywords), None if device is None else FROM_CPU
    if not isinstance(model, nn.Module) and (modules := modules_of(model)):
        return ManagedPipeline(modules, lambda module: managed(module, options, repeated=keywords, files=files))
    return managed(model, options, repeated=keywords, files=files)


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
    replaced: Sequence[Managed] = (),
) -> Managed:
    """Manages a model with parsed options. `repeated`: options that must not differ where the model is managed already.
    `files`: for a model on the CPU that was just loaded and is to move to the device: tensors that lie in files byte
    for byte, which are read from there. `progress` is called with bytes as they arrive. `on`: the runtime, by default
    the installed one. `grid`: points to measure in any case. `record`: of its iterations, if known.
    `replaced`: of models that have parts in common with this one, whose management ends with this if it fits."""
    if not isinstance(model, nn.Module):
        raise ManageError(f"manage() takes a torch.nn.Module or a pipeline of such, not {type(model).__name__}")
    started = on or devices.current()
    if started is not None and started.process != os.getpid():
        raise ForkedProcess("manage() was called")
    composed = managers.composed_with(None if started is None else started.device)
    rule = _rule(model, options, composed.tuning)

    def known() -> Managed | None:
        """Returns the model's Managed, if it has the same options. AlreadyManaged."""
        earlier = managed_as(model)
        if earlier is not None and all(getattr(earlier._options, name) == value for name, value in repeated.items()):
            return earlier
        _check_not_managed(model, replaced)
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
            control.offer(found_on, "sleep", partial(_put_to_sleep, found_on))
            control.offer(found_on, "wake", partial(_wake_up, found_on))
            if options.shared_budget is not None:
                shared.join(found_on, options.shared_budget, options.floor, options.priority, composed.tuning.sharing)
            if options.floor > shared.reach(device):
                raise OptionError(
                    f"floor is {format_size(options.floor)}, which the budget of {format_size(device.budget)} does not "
                    "have: give less, or raise the budget with ballonet.set_budget()"
                )
            mark("manage()", device)
            streams.wait_for_work(device)
            if replaced:  # none of them is touched for a model that does not fit
                held = [Vacated(part._weights.pages, part._weights.backings.host_pages) for part in replaced]
                follow.check_budget(
                    model, device, rule, composed.tuning.weights, Vacated(*map(sum, zip(*held, strict=True)))
                )
            left = [vacate(part) for part in replaced]
            vacated = Vacated(*map(sum, zip(*left, strict=True))) if left else NOTHING
            make = partial(Managed, model, gate, device, rule, options, files, progress, vacated)
            try:
                made = make()
            except BudgetError:
                if not lean_others(device):
                    raise
                try:
                    made = make()
                except BudgetError as error:  # what else is in their last pages is not the same in each run
                    smallest = error.smallest + device.page_size
                    raise BudgetError(error.required, error.budget, smallest, error.others) from None
            models[model] = made
            if (seed := found_on.settings.chaos) is not None:  # of tests alone, so its module comes only then
                import_module("ballonet.testing").move_pages(made, seed)
        try:
            streams.wait_for_work(device)  # other threads run it on other streams
            made._govern(grid, record)
        except BaseException:
            if files is None or files is FROM_CPU:
                made.release()
            else:  # it may be larger than torch's memory, and was not handed out yet
                made._let_go()
            raise
    if files is FROM_CPU:
        bring(members(model, ()), torch_device(device))
    outcomes_on(found_on).note_managed(model)
    return made


def _check_device(device: torch.device) -> None:
    """Installs ballonet if it is not. WrongDevice where the pool is on another device."""
    if devices.current() is None:
        install.install()
    there = torch_device(devices.of().device)
    if device.type != there.type or device.index not in (None, there.index):
        raise WrongDevice(f"ballonet was installed for {there}, not for {device}: install(device=...) chooses another")


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


def sleep(level: int = 1, *, timeout: float | None = None) -> None:
    """Puts all managed models to sleep, as `Managed.sleep`; raises the first error once all were tried."""
    _with_each(lambda managed: managed.sleep(level, timeout=timeout))


def wake() -> None:
    """Wakes all managed models, as `Managed.wake`; raises the first error once all were tried."""
    _with_each(Managed.wake)


def _with_each(act: Callable[[Managed], object]) -> None:
    errors: list[Exception] = []
    for managed in list(models.values()):
        try:
            act(managed)
        except (BallonetError, torch.OutOfMemoryError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def lean_others(device: Device) -> bool:
    """Has the models on the device that no thread runs give up what they hold for speed alone: slots beyond one.
    Returns whether there are any models."""
    others = [made for made in list(models.values()) if made._weights.device is device]
    for made in others:
        if not made.asleep:
            with suppress(ManageError, PoolExhausted):
                made._between_forwards(partial(_lean, made._residency), 0)
    return bool(others)


def _lean(residency: ModelResidency) -> None:
    """Leaves the model one shared slot, if it has no floor."""
    plan = residency.plan
    if len(plan.slot_pages) > 1 and not residency.options.floor:
        with residency.changing() as arrangement:
            arrangement.arrange(streaming(plan.pages, plan.streamed, 1))


def overlapping(model: nn.Module) -> list[tuple[nn.Module, Managed]]:
    """The managed models that have a module in common with this one."""
    parts = {id(module) for module in model.modules()}
    return [(other, made) for other, made in models.items() if any(id(module) in parts for module in other.modules())]


def has_inside(model: nn.Module, part: nn.Module) -> bool:
    """Is `part` the model, or has the model all of its modules inside?"""
    return {id(module) for module in part.modules()} <= {id(module) for module in model.modules()}


def _check_not_managed(model: nn.Module, replaced: Sequence[Managed]) -> None:
    for other, made in overlapping(model):
        if other is model:
            raise AlreadyManaged(
                f"this {type(model).__name__} is managed already: release() what manage() returned first"
            )
        if made not in replaced:
            raise AlreadyManaged(
                f"{type(model).__name__} has a part in common with a {type(other).__name__} that is managed already: "
                "manage the one that contains both, or release() the other first"
            )


def _managed_on(on: Runtime) -> list[tuple[nn.Module, Managed]]:
    """The managed models of the device, in the order of managing."""
    known = [model for reference in models.keyrefs() if (model := reference()) is not None]  # others manage meanwhile
    handles = [(model, handle) for model in known if (handle := models.get(model)) is not None]
    return [(model, handle) for model, handle in handles if handle._weights.device is on.device]


def _published(on: Runtime) -> list[dict[str, Any]]:
    """Returns, for `top` and metrics, the facts of each managed model of the device."""
    from .watch.facts import model_facts, with_names

    return with_names(
        model_facts(model, handle._residency, handle._weights, handle._prefixes) | {"asleep": handle.asleep}
        for model, handle in _managed_on(on)
    )


def _named(on: Runtime, name: str | None) -> list[Managed]:
    """The models of that name, as `top` shows it; all where None is given. ManageError where there is none."""
    names = [facts["name"] for facts in _published(on)]
    named = [handle for known, (_, handle) in zip(names, _managed_on(on), strict=True) if name is None or known == name]
    if not named:
        raise ManageError(f"no model {name or ''} is managed there: {', '.join(names) or 'none at all'}")
    return named


def _put_to_sleep(on: Runtime, model: str | None, level: int, timeout: float) -> None:
    """Does what `ballonet sleep` asks of this process."""
    for handle in _named(on, model):
        handle.sleep(level, timeout=timeout)


def _wake_up(on: Runtime, model: str | None) -> None:
    """Does what `ballonet wake` asks of this process."""
    for handle in _named(on, model):
        handle.wake()
