"""A managed model: its weights in the pool, a lease around its forwards, the elastic cache under its `generate()`."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from time import sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import torch
from torch import nn

from ..allocator import devices
from ..allocator._native import Device
from ..allocator.devices import Runtime
from ..allocator.errors import BallonetError, ManageError, ModelInUse, PoolExhausted
from ..allocator.interrupts import Finalizer
from ..allocator.units import format_size
from ..offload.policy.plan import Rule
from ..offload.record.record import Point, Record
from . import attaching
from .device import managers, shared
from .device.managers import give_up_graphs
from .device.streams import marks_of
from .forward.forwards import ForwardEvents, Forwards, explain
from .forward.gate import Gate
from .forward.hook_base import local_layers_of
from .forward.lease import Turns
from .measure.pace import Pace, point_of
from .measure.process_report import Outcomes, ProcessReport
from .measure.report import PiecesReport, Report
from .options import ManageOptions
from .streaming.model_residency import ModelResidency
from .streaming.sleep import Sleep, check_level
from .weights.follow import WeightsFollower
from .weights.model_parts import decoder_layers, members, runners
from .weights.moving import bring
from .weights.ranges import NOTHING, Files, Vacated, Weights

if TYPE_CHECKING:
    from .pieces.runner import PieceRunner
    from .prefix.store import PrefixStore
    from .profile import Grid

T = TypeVar("T")
models: Final[weakref.WeakKeyDictionary[nn.Module, Managed]] = weakref.WeakKeyDictionary()
lock: Final = threading.RLock()


class _Working(threading.local):
    """The sizes of the last forward of this thread; None where they are not known."""

    of: Point | None = None


def _kept(model: nn.Module, device: Device) -> Record | None:
    """Returns the model's record that was measured on this machine, if any, by which a plan of the run decides."""
    from .profile import kept

    return kept(model, device)


def forwards_of(managed: Managed) -> Forwards:
    """The hooks and running forwards of its model."""
    return managed._forwards


def pace_of(managed: Managed) -> Pace:
    """The times of its model's forwards."""
    return managed._pace


def weights_of(managed: Managed) -> Weights:
    """The ranges of its model's weights."""
    return managed._weights


def residency_of(managed: Managed) -> ModelResidency:
    """The residency of its model's layers."""
    return managed._residency


def between_forwards(managed: Managed, act: Callable[[], T]) -> T:
    """Calls `act` while no forward of the model runs on any thread and none begins, and returns its result. Changes of
    the model are caught up with before. ManageError where it is not managed any more; ModelInUse where a forward does
    not end within `Waiting.gate`, or this is called within one; the errors of `act`."""
    return managed._between_forwards(act)


def managed_as(model: nn.Module) -> Managed | None:
    """Returns the result of `manage(model)`, None where the model is not managed."""
    return models.get(model)


class Managed:
    """A model whose weights lie in the pool. A context manager that releases it. Does not keep the model alive."""

    def __init__(
        self,
        model: nn.Module,
        gate: Gate,
        device: Device,
        rule: Rule,
        options: ManageOptions,
        files: Files | None,
        progress: Callable[[int], object],
        vacated: Vacated = NOTHING,
    ) -> None:
        """Called by `managed()`, which checks the arguments and has closed the gate."""
        self._name = type(model).__name__
        self._options = options
        self._pieces: PieceRunner | None = None
        self._not_pieces: PiecesReport | None = None  # why there is none
        self._prefixes: PrefixStore | None = None
        self._forget_prefixes: Callable[[], object] = attaching.nothing
        self._model = weakref.ref(model)
        known = weakref.ref(self)
        generators = attaching.generators(model)

        def residency() -> ModelResidency | None:
            return None if (it := known()) is None else it._residency

        def touched() -> None:
            """Forgets prefixes, whose weights may not be what they were."""
            if (it := known()) is not None and it._prefixes is not None:
                it._prefixes.clear()

        with ExitStack() as undo:
            attached = (
                attaching.attach_caches(model, device, options, residency) if generators else attaching.Attached()
            )
            self._calls, self._detach = attached.calls, attached.undo
            undo.callback(self._detach)
            manager = managers.of(device)
            tuning, now = manager.tuning, manager.nanoseconds
            self._patience = tuning.waiting.files
            self._pace = Pace(marks_of(device, now), now, device.driver_ns)
            self._weights = Weights(device, self._pace.waiting, tuning.weights)
            self._pages = manager.pages
            self._turns = Turns(self._weights.group, tuning.waiting, manager.waits)
            self._follower = WeightsFollower(self._weights)
            undo.callback(self._follower.close)
            self._residency = ModelResidency(model, self._weights, self._turns, self._pace, manager, options)
            self._residency.wanted_until = attached.wanted
            self._sleep = Sleep(
                model,
                self._weights,
                self._residency,
                manager,
                attached.caches,
                managers.composed_with(device).interpreter,
                touched,
            )
            plan = self._follower.adopt(model, rule, files, progress, vacated)
            undo.callback(self._weights.restore, model)
            self._point = _Working()
            self._behind = False  # was a look at the model interrupted?
            streaming = self._residency.streaming
            self._forwards = Forwards(
                self._weights,
                ForwardEvents(
                    attached.lease,
                    self._before,
                    self._residency.after,
                    partial(managers.yield_pages, device, manager),
                    self._explain,
                ),
                self._turns,
                streaming,
                local_layers_of(model),
            )
            undo.callback(self._forwards.unhook)
            inner = runners(model)
            whole = [module for module, runs_all in inner.items() if runs_all]
            self._forwards.hook(gate, dict.fromkeys((model, *generators, *whole)), inner.keys() - {*generators, *whole})
            self._residency.arrangement.tell = self._forwards.streams
            undo.callback(self._residency.close)
            # now, as later looks would have layers read from their files
            self._record = None if options.slo else _kept(model, device)
            self._follow(model, len(plan.slot_pages))
            self._pieces, self._forget_pieces = (
                attaching.attach_pieces(generators[0], device, options, self._residency, self._forwards, self._pace)
                if generators
                else (None, attaching.nothing)
            )
            undo.callback(self._forget_pieces)
            if generators and (why := attaching.why_no_pieces(generators[0], device, options)):
                self._not_pieces = PiecesReport("eager", why)
            self._prefixes, self._forget_prefixes = (
                attaching.attach_prefixes(generators[0], device, options, self._residency)
                if generators and options.kept_prefixes
                else (None, attaching.nothing)
            )
            undo.pop_all()
        self._finalizer = Finalizer(
            model,
            self._forget_prefixes,
            self._forget_pieces,
            partial(self._residency.stop, collected=True),
            self._follower.close,
            self._forwards.forget,
            self._forwards.unhook,
            self._detach,
            self._show_what_is_left,
            self._residency.close,
            self._weights.forget,
        )

    @property
    def model(self) -> nn.Module | None:
        """The model, None once it is collected."""
        return self._model()

    def report(self) -> Report:
        """Returns the state of the model: where its weights are, which layers stream and why, the times by the record
        and as measured, bytes over the link, tensors outside of the pool, and its options."""
        return replace(
            self._residency.report(),
            streamed=self._weights.away(),
            pages=self._weights.pages,
            host_pages=self._weights.backings.host_pages,
            unmanaged_tensors=dict(self._follower.left),
            released=self._released,
            options=self._options,
            pieces=self._not_pieces if self._pieces is None else self._pieces.report(),
        )

    @property
    def prefixes(self) -> PrefixStore | None:
        """The kept prefixes, and counts of their use; None without `prefix_cache`."""
        return self._prefixes

    def resident(self) -> AbstractContextManager[None]:
        """A `with` block in which layers stay in place, and streamed ones are read on the host. For threads that read
        weights by their own references while other threads run models, which may need pages."""
        return self._turns.section()

    def editable(self) -> AbstractContextManager[None]:
        """The same `with` block as `resident`, for writing to weights: a layer's own forward may write to them, too."""
        return self._turns.section()

    def sleep(self, level: int = 1, *, timeout: float | None = None) -> None:
        """Moves everything of the model off the device, until it is used again or `wake()`: weights, caches, kept
        prefixes, slots, graphs. Its pages go back to the driver, or to the shared budget.

        `level`: 1: all goes to the host. 2: what the weights' file has byte for byte is read from there again and takes
        no memory, the rest goes to the host. Nothing is lost in either, and weights may be written to in any way
        meanwhile. `timeout`: seconds to wait for forwards, `generate()` and batched requests that run, by default
        those of `Waiting.gate`. A new use wakes the model by itself, layer by layer.

        Raises ModelInUse where something still runs then, ManageError where the host has too little room or a graph of
        the program's has captured weights, DriverError; the model is awake then, as before.
        """
        check_level(level)
        if self._sleep.level == level:
            return
        manager = managers.of(self._weights.device)
        patience = manager.tuning.waiting.gate if timeout is None else timeout
        end = manager.waits() + patience
        while self._calls() or self._residency.wanted_until() == math.inf:
            if manager.waits() > end:
                raise ModelInUse(
                    f"{self._name} serves requests, and sleeps when it has none: end them, or give a longer timeout"
                )
            sleep(manager.tuning.waiting.gate_look)
        self._between_forwards(partial(_fall_asleep, self, level), max(0.0, end - manager.waits()))
        shared.give_back(self._weights.device)

    def wake(self) -> None:
        """Brings the model back to the device; its layers follow at its next forward, each while those before it
        compute. Idempotent. Raises ModelInUse where a forward runs, torch.OutOfMemoryError, WeightsFileChanged,
        DriverError; it sleeps on then."""
        if self._sleep.level:
            try:
                self._between_forwards(attaching.nothing)
            except PoolExhausted as error:
                raise torch.OutOfMemoryError(f"no room to wake {self._name}: {error}") from error

    @property
    def asleep(self) -> int:
        """The level at which it sleeps, 0 while it is awake."""
        return 0 if self._released else self._sleep.level

    def release(self) -> None:
        """Gives the model back as it was: the same tensors, in torch's own memory, without hooks. Idempotent.

        All or nothing: raises ModelInUse while a forward of the model runs, torch.OutOfMemoryError where torch has
        no room for one more layer, WeightsFileChanged, DriverError; the model is then managed as before.
        """
        if not self._released and self._forwards.running():
            raise ModelInUse(f"a forward of {self._name} is running: release() it afterwards")
        if self._prefixes is not None:
            self._prefixes.flush(self._patience)
        with lock:
            model = self._model()
            if self._released or model is None:
                return
            gate = Gate(model)
            with gate.closed():
                self._forwards.check_none_runs(gate)
                self._release(model)

    def _release(self, model: nn.Module) -> None:
        """Releases the model, while no forward runs or begins."""
        self._sleep.show()
        self._behind = True  # if this fails, the next forward makes layers stream again
        if self._pieces is not None:
            self._pieces.invalidate()
        self._residency.stop()
        self._residency.close()
        try:
            self._weights.restore(model)
            if self._weights.home.type == "cpu":  # a model from the CPU goes back there as a whole
                bring(members(model, ()), self._weights.home)
        except BaseException:
            with suppress(BallonetError, PoolExhausted):  # the next forward does it then
                self._follow(model, 1)
            self._residency.resume()
            raise
        self._sleep.close()
        self._forget_prefixes()
        self._forget_pieces()
        self._follower.close()
        self._detach()
        self._forwards.unhook()
        self._finalizer.detach()
        models.pop(model, None)

    def _govern(self, grid: Grid | None, record: Record | None = None) -> None:
        """Measures iterations, if they matter, and lets the manager change the residency from now on. SLOError."""
        from .profile import load_or_measure

        record = record or (self._record if grid is None else None)
        model = self._model()
        assert model is not None  # manage() holds it
        device, residency = self._weights.device, self._residency

        def known() -> Record:
            """The record of its iterations, measured with all layers resident where there is none."""
            return record or load_or_measure(model, self._pace, device, grid, residency=residency).record

        if residency.options.slo or any(residency.plan.pages):
            residency.start(known, grid is not None or record is not None)

    @property
    def _released(self) -> bool:
        """Has the management ended, as the model was released or collected?"""
        return not self._finalizer.alive

    def _let_go(self) -> None:
        self._finalizer()
        model = self._model()
        if model is not None:
            models.pop(model, None)

    def _show_what_is_left(self) -> None:
        """Makes tensors that outlive the collected model readable, unless their file has changed; its ranges go with
        its tensors."""
        with suppress(BallonetError, PoolExhausted):
            self._sleep.show()
            for layer in self._weights.on_host():
                self._weights.ring.reveal(layer)
        self._sleep.close()

    def _between_forwards(self, act: Callable[[], T], patience: float | None = None) -> T:
        model = self._model()
        if self._released or model is None:
            raise ManageError(f"this {self._name} is {_end_of(self)}, and managed no more")
        gate = Gate(model)
        with gate.closed():
            self._wait_until_none_runs(gate, patience)
            with lock:
                if self._released:
                    raise ManageError(f"this {self._name} is {_end_of(self)}, and managed no more")
                self._sleep.end()
                if self._behind or self._follower.pending:
                    self._behind = True
                    self._residency.change(partial(self._catch_up, model))
                self._behind = True  # if it fails, the next forward looks at the model again
                done = act()
                self._behind = False
                return done

    def _wait_until_none_runs(self, gate: Gate, patience: float | None) -> None:
        """Waits until no forward runs; without the lock, for which a forward may wait."""
        manager = managers.of(self._weights.device)
        waiting, clock = manager.tuning.waiting, manager.waits
        end = clock() + (waiting.gate if patience is None else patience)
        while True:
            try:
                self._forwards.check_none_runs(gate)
            except ModelInUse:
                if gate.inside(sys._getframe()) or clock() > end:
                    raise ModelInUse(
                        f"a forward of {self._name} is running, and its layers change between forwards only: try again "
                        "when it has ended"
                    ) from None
                sleep(waiting.gate_look)
            else:
                return

    def _before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called at the beginning of an outermost forward, under its lease."""
        if self._sleep.level and not self._pace.capturing():
            with lock:
                if self._residency.alone:
                    self._sleep.end(kwargs)
                else:
                    self._sleep.show()
        if self._behind or self._follower.pending:
            with lock:
                model = None if self._released else self._model()
                # A later forward sees that a look is pending and waits for the lock.
                if model is not None and self._residency.alone and (self._behind or self._follower.pending):
                    self._behind = True
                    self._residency.change(partial(self._catch_up, model))
                    self._behind = False
        if self._pages.short:
            give_up_graphs(self._weights.device)
        cache = kwargs.get("cache")
        if cache is None:
            cache = kwargs.get("past_key_values")
        if cache is not None and self._residency.alike.continues(args, kwargs, cache):
            self._residency.captured.thread.open = True
            return
        self._point.of = point = point_of(args, kwargs)
        self._residency.before(point, cache, kwargs)

    def _explain(self, error: torch.OutOfMemoryError) -> None:
        """Makes the out-of-memory error of a forward on this thread say which changes would have helped."""
        if self._pieces is not None:
            self._pieces.exhausted = True
        point, config = self._point.of, getattr(self._model(), "config", None)
        if point is None or config is None:
            return
        device = self._weights.device
        others = device.snapshot()["pages"]["weights"] - self._weights.pages
        sizes = {
            "batch": point.batch,
            "context": point.length + (point.phase == "decode"),
            "budget": device.budget - max(0, others) * device.page_size,
            "page_size": device.page_size,
        }
        explain(error, partial(_changes, config, sizes))

    def _catch_up(self, model: nn.Module) -> None:
        changed = True  # also where this is interrupted
        try:
            changed = self._follower.catch_up(model)
        finally:
            if changed and self._pieces is not None:
                self._pieces.invalidate()  # the addresses in graphs may be others'
        with suppress(PoolExhausted):  # the layers are read in place until the manager finds room
            self._follow(model, 1)

    def _follow(self, model: nn.Module, slots: int) -> None:
        layers = decoder_layers(model)
        self._forwards.hook_layers(layers)
        self._residency.follow(layers, slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self._released:
            return f"<Managed {self._name}: {_end_of(self)}>"
        report = self.report()
        weights = f"{report.pages} pages ({format_size(report.pages * report.page_size)}) of weights"
        streamed = f", {len(report.streamed)} of them streamed" if report.streamed else ""
        captured = f", {len(report.kept)} of them in CUDA graphs" if report.kept else ""
        return f"<Managed {self._name}: {self._forwards.count} decoder layers{streamed}{captured}, {weights}>"

    def _repr_html_(self) -> str:
        """Renders the state for a notebook."""
        return self.report()._repr_html_()


def _end_of(managed: Managed) -> str:
    """How its management has ended."""
    return "collected" if managed.model is None else "released"


def _fall_asleep(managed: Managed, level: int) -> None:
    """Puts the model to sleep, while no forward of it runs or begins."""
    if managed._prefixes is not None:
        managed._prefixes.flush(managed._patience)
    if managed._pieces is not None:
        managed._pieces.invalidate()
    managed._sleep.begin(level)


def vacate(managed: Managed) -> Vacated:
    """Ends the management with the weights where they lie, for a model that has parts in common with this one and moves
    them next. ModelInUse where a forward runs, or a graph of the program's has captured weights."""
    model = managed.model
    if managed._released or model is None:
        return NOTHING
    gate = Gate(model)
    with gate.closed():
        managed._forwards.check_none_runs(gate)
        if managed._residency.arrangement.in_graphs:
            raise ModelInUse(f"CUDA graphs have captured weights of {managed._name}, which keep their addresses")
        managed._sleep.show()
        vacated = managed._weights.vacating
        managed._let_go()
        return vacated


def _changes(config: Any, sizes: Mapping[str, int]) -> Sequence[str]:
    from .plan.planner import helpful_changes  # a later folder: imported when the error is read

    return helpful_changes(config, **sizes)


def outcomes_on(runtime: Runtime) -> Outcomes:
    """How the models of the runtime fared."""
    return runtime.parts.of(Outcomes, Outcomes)


def report() -> ProcessReport:
    """Returns what became of the models of this process: which are managed and how, which are not and why."""
    with lock:
        reports = tuple(managed.report() for managed in models.values())
    known = [outcomes_on(runtime) for runtime in devices.every()]
    managed = sum((on.managed for on in known), Counter[str]())
    return ProcessReport(reports, managed, {name: why for on in known for name, why in on.left.items()})


def all_managed() -> list[tuple[nn.Module, Weights]]:
    """The models that are managed now, and their weights."""
    with lock:
        return [(model, managed._weights) for model, managed in models.items()]
