"""`manage()`: what is checked, and in which order a model comes to be managed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from ..allocator import devices, install, looks
from ..allocator.devices import Runtime
from ..allocator.errors import AlreadyManaged, ManageError, OptionError
from ..allocator.units import format_size
from ..offload.policy.plan import Fewest, Interval, Rule
from ..offload.policy.tuning import Tuning
from ..offload.record.record import Record
from ..offload.timeline.recorder import mark
from .device import governors, shared, streams
from .forward.gate import Gate
from .managed import Managed, lock, managed_as, models
from .options import ManageOptions, check_known, given
from .weights.backings import Files
from .weights.layers import decoder_layers

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
    **unknown: object,
) -> Managed:
    """Moves the weights of `model` into the pool and hooks it; `generate()` then uses the elastic KV cache. Undone by
    `release()`.

    Any module is accepted. Each decoder layer of a transformers model gets a range of its own; in other modules
    everything is resident. `interval`: of every so many decoder layers the last streams: its weights are on the host
    and come over while the layers before it compute (Select-N §4.3). "auto" streams as few layers as the budget
    demands, as a rule none, gives pages of layers to KV caches that find no others, and takes them back (Oneiros §5);
    None never streams. A model whose layers stream is used under `torch.no_grad()`, as `generate()` does it, or is
    slow.

    `tpot_slo`, `ttft_slo`: seconds, or a text such as "80ms", that a decode step and a prefill may take. "auto" then
    streams as many layers as that allows, so that their pages are free (Select-N §4.5). What iterations take is
    measured first, if there is no record of it on this machine. They hold for each request that is batched, too, where
    it asks nothing else; `ttft_slo` counts from its arrival then. `priority`: models with the lowest give their pages
    first, and those of their KV caches. `floor`: bytes of device memory, or a text such as "2GiB", that its weights and
    caches keep together, whoever is short. `prefix_cache`: True, or a size such as "8GiB", that what `generate()`
    computed is kept, and a prompt that begins with something that is kept computes only the rest; see
    `Managed.prefixes`. `prefix_dir`: a folder where it is kept for later processes too, written in the background; at
    most `prefix_dir_limit` bytes in all, those that were used last (16 GiB by default); `prefix_cache` is True then.
    What lies there is as private as what was said. `shared_budget`: bytes of device memory, or a text, that this
    process shares with others of the same user, or True for what those share already: who needs pages has
    them. `batches`: of `generate_batch()` and the server: "fast" has as many requests in a step as make the most tokens
    per second, once that is known; "full" as many as there is room for.

    Each option can be given by the environment, too, as BALLONET_ and its name in capitals (BALLONET_TPOT_SLO). That
    counts where the keyword is left at its default.

    Calls `ballonet.install()` with its defaults where that was not done. Called again for the same model, with the same
    options or none, it returns the same Managed.

    The model may be changed in every way that torch and transformers know. What is new in it (converted, assigned,
    resized weights, adapters, layers) is brought into the pool at its next forward; what cannot be is in
    `Managed.report().unmanaged_tensors`. Copies of it are not managed. Views of weights that were taken before keep the
    old memory, as with `Module.to`. A failure changes nothing. Forwards that run on other threads are waited for, and
    those that begin wait (gate.py).

    Raises ManageError (OptionError, AlreadyManaged, WrongDevice, ModelInUse where a forward does not end within 30 s or
    this is called within one, SLOError: with the nearest SLO and budget that would do), BudgetError,
    torch.OutOfMemoryError, DriverError, and what `install()` raises.
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
    """`manage()`, its options being parsed. `repeated`: those that have to be as before where the model is managed
    already. `files`: given for a model on the CPU that was just loaded and is to come to the device;
    its tensors that are in files byte for byte are read from there. `progress` is told of bytes as they arrive. `on`:
    whose pages it gets, by default those of what is installed. `grid`: what is measured of it in any case.
    `record`: what its iterations take, where that is known."""
    if not isinstance(model, nn.Module):
        raise ManageError(f"manage() takes a torch.nn.Module, not {type(model).__name__}")
    started = on or devices.current()
    composed = governors.composed_with(None if started is None else started.device)
    rule = _rule(model, options, composed.tuning)

    def known() -> Managed | None:
        """What was returned for it before, with the same options or none. AlreadyManaged."""
        found = managed_as(model)
        if found is not None and all(getattr(found._options, name) == value for name, value in repeated.items()):
            return found
        _check_not_managed(model)
        return None

    with lock:
        if (found := known()) is not None:
            return found
    composed.interpreter.check()
    gate = Gate(model, composed.tuning.waiting, composed.waits)
    with gate.closed():
        gate.wait_until_unused()  # without the lock, for which a forward may wait
        with lock:
            if (found := known()) is not None:
                return found
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
            made = Managed(model, gate, device, found_on.settings.chaos, rule, options, files, progress)
            models[model] = made
        try:
            streams.wait_for_work(device)  # other threads run it on other streams
            made._govern(grid, record)
        except BaseException:
            if files is None:
                made.release()
            else:  # it may be larger than what torch has room for, and nobody has seen it yet
                made._let_go()
            raise
    return made


def _rule(model: nn.Module, options: ManageOptions, tuning: Tuning) -> Rule:
    """Which of its layers stream at first. OptionError where it has not the layers that the options need."""
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
    """For those who watch: each managed model of the device, in the order in which they came."""
    from .watch.facts import model_facts, with_names

    found = list[dict[str, Any]]()
    for known in models.keyrefs():  # a list of its own: other threads manage and release meanwhile
        model = known()
        handle = None if model is None else models.get(model)
        if model is not None and handle is not None and handle._weights.device is on.device:
            found.append(model_facts(model, handle._residency, handle._weights, handle._prefixes))
    return with_names(found)
