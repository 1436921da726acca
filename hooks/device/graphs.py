"""What CUDA graphs have captured of managed models and of their caches, and the leases of replays.

Note [Captured]
    A replay reads the addresses that were read at the capture, at any time, and no hook runs then. So a layer that was
    captured stays resident for as long as the graph may be replayed: until it is reset, or collected. The model says so
    before anything is captured (`CapturedModel.keep`). A layer that is not resident cannot be captured.

Note [What was read]
    torch does not tell what a graph reads. So all that it may read counts as captured:
    - where a forward of the model is open on the thread when a capture begins, or begins within one, all layers that
      are resident: a compiled layer reads its weights with no hook;
    - where a module of a layer is called by itself, that layer;
    - all that another graph has captured whose memory this one shares, as it may be the backward of that one, or which
      is replayed within the capture.
    A weight that is read outside of any module is not noticed, unless its layer streams.

Note [Replays]
    A replay is leased as a forward is: by every group that was captured, until its kernels are submitted. Then they are
    ordered, as its stream is noted before. A graph of a model that is released reads addresses that lead nowhere, or
    to something else, so it is refused.

Note [Captures by others]
    torch's own class is wrapped (allocator/captures.py). When a program begins a capture by other means, the end of its
    graph's life is unknown: layers that it captures stay resident until the model is released.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ...allocator import captures, devices
from ...allocator._native import Device, Group, Lease
from ...allocator.errors import ManageError
from ...allocator.interrupts import Finalizer, Guarded, guarded
from ...allocator.units import format_size
from .streams import stream_of


class CapturedModel(Protocol):
    """A managed model."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> Group: ...
    @property
    def device(self) -> Device: ...
    @property
    def followed(self) -> bool:
        """Is it managed still?"""

    @property
    def kept_pages(self) -> int:
        """Device pages of layers that stay resident, as graphs have captured them."""

    @property
    def runs_on_this_thread(self) -> bool:
        """Is a forward of it open on this thread?"""

    def prepare_capture(self) -> None:
        """Makes layers resident, as far as that can be done now, before a capture begins."""

    def keep(self, layers: Iterable[int] | None, records: Sequence[CaptureRecord]) -> None:
        """Adds these layers, with None all resident ones, to `records` (`CaptureRecord.add`) as they are about to be
        captured. ManageError where one of them is not resident."""

    def update_kept(self) -> bool:
        """Keeps resident what graphs have captured by now. False where another thread has the lock."""

    def listen(self) -> list[RemovableHandle]:
        """Hooks its modules so that their calls record what a capture includes (`noticed`), until the handles are
        removed."""

    def yield_pages(self) -> None:
        """Gives what other threads request of this one. DriverError."""


class CaptureRecord:
    """The models, layers and groups that one graph has captured."""

    def __init__(self, before: CaptureRecord | None = None) -> None:
        """`before`: the record of an earlier capture into the same graph."""
        self.before = before
        self.thread = threading.get_ident()
        self.capturing = False
        self.pool: object = None  # the memory pool of the graph
        self._models: dict[
            int, tuple[weakref.ref[CapturedModel], str, set[int]]
        ] = {}  # by id: itself, its name, its layers
        self._groups: list[tuple[Device, Group]] = []
        self._shown: list[torch.Tensor] = []
        self._lease = Lease()
        self._handles: list[RemovableHandle] = []
        self.noticed: set[tuple[int, tuple[int, ...] | None]] = set()  # in this capture: models by id, and layers

    def begin(self, models: Iterable[CapturedModel]) -> None:
        """Captures the calls of these models' modules from now on."""
        self.capturing = True
        for model in models:
            self._handles += model.listen()

    def end(self) -> None:
        """Ends the capture. On any thread, idempotent."""
        self.capturing = False
        self.noticed.clear()
        while self._handles:
            self._handles.pop().remove()
        self._lease.close()

    def add(self, model: CapturedModel, layers: Iterable[int]) -> None:
        """Adds layers of `model`, by the ids of their modules."""
        known = self._models.get(id(model))
        if known is None or known[0]() is not model:
            known = self._models[id(model)] = weakref.ref(model), model.name, set()
        known[2].update(layers)
        self.lease(model.device, model.group)

    def lease(self, device: Device, group: Group) -> None:
        """Leases the group while the graph is captured, and around each replay."""
        device.note_stream(stream_of(device)())
        if not any(leased is group for _, leased in self._groups):
            self._groups.append((device, group))
        if self.capturing:
            self._lease.enter(group)

    def show(self, tensors: Iterable[torch.Tensor]) -> None:
        """Holds tensors that the graph reads."""
        self._shown += tensors

    def include(self, other: CaptureRecord) -> None:
        """Adds all that the other one has captured."""
        for reference, _, layers in list(other._models.values()):
            model = reference()
            if model is not None and model.followed:
                self.add(model, layers)
        for device, group in list(other._groups):
            self.lease(device, group)
        self._shown += other._shown

    def layers(self, model: CapturedModel) -> frozenset[int] | None:
        """The ids of the modules of the model's layers that it has captured; None where it has captured nothing of
        it."""
        known = self._models.get(id(model))
        return None if known is None or known[0]() is not model else frozenset(known[2])

    @property
    def models(self) -> list[CapturedModel]:
        """The models of which it has captured layers or caches. ManageError where one of them is not managed any
        more."""
        models = []
        for reference, name, _ in list(self._models.values()):
            model = reference()
            if model is None or not model.followed:
                raise ManageError(
                    f"this CUDA graph reads weights of {name}, which was released or collected since it was captured: "
                    "capture it again"
                )
            models.append(model)
        return models

    def leased(self) -> Guarded[None]:
        """Leases all groups around a replay, see Note [Replays]. ManageError, DriverError."""
        lease = Lease()
        return guarded(partial(self._enter, lease), lambda failed: lease.close())

    def _enter(self, lease: Lease) -> None:
        for model in self.models:
            model.yield_pages()
        for _, group in self._groups:
            lease.enter(group)
        for runtime in devices.every():  # also for memory of no model
            runtime.device.note_stream(stream_of(runtime.device)())

    def close(self) -> None:
        """Ends the record with its graph. Its models are told later: this may be a finalizer."""
        self.end()
        GRAPHS.loosened.extend(reference for reference, _, _ in self._models.values())
        self._shown.clear()


class _Graphs(captures.CaptureListener):
    """The records of all graphs, captured by torch's own class, which is one for all devices, or by other means."""

    def __init__(self) -> None:
        self.records: dict[int, CaptureRecord] = {}  # by id of the graph
        self.others: dict[
            int, CaptureRecord
        ] = {}  # by id of the model: of captures that torch's class does not know of
        self.models: dict[int, weakref.ref[CapturedModel]] = {}  # managed models, by id
        self.loosened: deque[weakref.ref[CapturedModel]] = deque()  # models with a freed graph; see `tell_of_dropped`

    def begins(self, graph: Any, pool: object) -> None:
        tell_of_dropped()
        before = self.records.get(id(graph))
        if before is None:
            Finalizer(graph, partial(_drop, id(graph)), _leave)
        record = self.records[id(graph)] = CaptureRecord(before)
        models = _managed()
        for model in models:
            model.prepare_capture()
        record.begin(models)
        for other in list(self.records.values()):
            if pool is not None and other.pool == pool and other is not record:
                _include(record, other)
        if before is not None:
            _include(record, before)
        for model in models:
            if model.runs_on_this_thread:
                model.keep(None, [record])

    def ended(self, graph: Any, *, captured: bool) -> None:
        record = self.records.get(id(graph))
        if record is None:
            return
        record.end()
        if captured:
            record.pool, record.before = graph.pool(), None
        elif record.before is None:
            self.reset(graph)
        else:  # a failed capture leaves torch's graph as it was
            self.records[id(graph)] = record.before
            record.close()
            tell_of_dropped()

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        record = self.records.get(id(graph))
        if record is None:
            return nullcontext()
        for outer in _captures_of_this_thread():
            _include(outer, record)
        return record.leased()

    def reset(self, graph: Any) -> None:
        _drop(id(graph))
        tell_of_dropped()


GRAPHS: Final = _Graphs()


def capturing(cuda: bool) -> bool:
    """Does this thread capture its work? `cuda`: does it compute on a GPU?"""
    return cuda and torch.cuda.is_current_stream_capturing()


def attend(model: CapturedModel) -> None:
    """Records captures of the model from now on. Idempotent."""
    GRAPHS.models[id(model)] = weakref.ref(model)
    if hasattr(torch.cuda, "CUDAGraph"):
        captures.listen(GRAPHS)


def forget(model: CapturedModel) -> None:
    """Ends the management of the model: graphs that have captured it refuse to replay from now on."""
    GRAPHS.models.pop(id(model), None)
    GRAPHS.others.pop(id(model), None)
    _leave()


def noticed(model: CapturedModel, layers: tuple[int, ...] | None = None) -> None:
    """Records, on a thread whose stream is captured, that layers are about to be read: with None all resident ones,
    with () weights of no layer. ManageError where one of them is not resident."""
    records = _captures_of_this_thread() or [GRAPHS.others.setdefault(id(model), CaptureRecord())]
    if new := [record for record in records if (id(model), layers) not in record.noticed]:
        model.keep(layers, new)
    for fresh in new:
        if fresh.capturing:  # the layers cannot change within a capture
            fresh.noticed.add((id(model), layers))


def shows(device: Device, group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """Keeps tensors alive as long as the graph that this thread's stream is captured into, which is about to read them;
    `group` leases their pages."""
    shown = list(tensors)
    for record in _captures_of_this_thread():
        record.lease(device, group)
        record.show(shown)


def layers_of(model: CapturedModel) -> frozenset[int]:
    """The ids of the modules of the layers that graphs have captured."""
    records = [*GRAPHS.records.values(), *filter(None, [GRAPHS.others.get(id(model))])]
    return frozenset().union(*(record.layers(model) or () for record in records))


def read(model: CapturedModel) -> bool:
    """Does any graph read weights of the model?"""
    records = [*GRAPHS.records.values(), *filter(None, [GRAPHS.others.get(id(model))])]
    return any(record.layers(model) is not None for record in records)


def why_short() -> str:
    """Returns, for an out-of-memory message, which pages graphs keep; empty where they keep none."""
    kept = [(model, pages) for model in _managed() if (pages := model.kept_pages)]
    if not kept:
        return ""
    named = ", ".join(f"{format_size(pages * model.device.page_size)} of {model.name}" for model, pages in kept)
    return f". CUDA graphs keep layers on the device that they have captured ({named}): drop graphs, or reset() them"


def leases(group: Group) -> int:
    """Counts the captures that lease the group now."""
    return sum(
        record.capturing and any(group is mine for _, mine in record._groups)
        for record in list(GRAPHS.records.values())
    )


def tell_of_dropped() -> None:
    """Tells models of graphs that are freed. Called before the next forward of any of them."""
    for _ in range(len(GRAPHS.loosened)):
        reference = GRAPHS.loosened.popleft()
        model = reference()
        if model is not None and not model.update_kept():
            GRAPHS.loosened.append(reference)
    if not GRAPHS.models:
        _leave()


def _captures_of_this_thread() -> list[CaptureRecord]:
    """Returns the captures that run on this thread."""
    return [
        record
        for record in list(GRAPHS.records.values())
        if record.capturing and record.thread == threading.get_ident()
    ]


def _managed() -> list[CapturedModel]:
    models = (reference() for reference in list(GRAPHS.models.values()))
    return [model for model in models if model is not None and model.followed]


def _include(record: CaptureRecord, other: CaptureRecord) -> None:
    record.include(other)
    GRAPHS.loosened.extend(reference for reference, _, _ in list(record._models.values()))
    tell_of_dropped()


def _drop(key: int) -> None:
    record = GRAPHS.records.pop(key, None)
    if record is not None:
        record.close()


def _leave() -> None:
    if not GRAPHS.models and not GRAPHS.records:
        captures.leave(GRAPHS)
