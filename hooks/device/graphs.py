"""What CUDA graphs have captured of managed models and of their caches, and the leases of replays.

Note [Captured]
    A replay reads the addresses that were read at the capture, at any time, and no hook runs then. So a layer that was
    captured stays resident for as long as the graph may be replayed: until it is reset, or collected. The model says so
    before anything is captured (`CapturedModel.keep`). A layer that is not resident cannot be captured.

Note [What was read]
    by a graph nobody tells. What may have been read counts as captured:
    - where a forward of the model is open on the thread when a capture begins, or begins within one, all layers that
      are resident: a compiled layer reads its weights with no hook;
    - where a module of a layer is called by itself, that layer;
    - what another graph has captured whose memory this one shares, as it may be the backward of that one, or which is
      replayed within the capture.
    A weight that is read outside of any module is not noticed, unless its layer streams.

Note [Replays]
    A replay is leased as a forward is: by every group that was captured, until its kernels are submitted. Then they are
    ordered, as its stream is noted before. A graph of a model that is released reads addresses that lead nowhere, or
    to something else, so it is refused.

Note [Captures by others]
    torch's own class is wrapped (allocator/captures.py). Of a capture that a program begins by itself nobody can tell
    when its graph is gone: what it captures stays resident until the model is released.
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
    def here(self) -> bool:
        """Is a forward of it open on this thread?"""

    def prepare_capture(self) -> None:
        """A capture is about to begin: what can be captured only while it is resident is so, if that can be now."""

    def keep(self, layers: Iterable[int] | None, records: Sequence[CaptureRecord]) -> None:
        """Records that these layers, with None all resident ones, are about to be captured: `CaptureRecord.add`.
        ManageError where one of them is not resident."""

    def kept(self) -> bool:
        """Graphs keep other layers than they did. False where it has no time for that now."""

    def listen(self) -> list[RemovableHandle]:
        """Has the calls of its modules say what they capture (`noticed`), until the handles are removed."""

    def yield_pages(self) -> None:
        """Gives what other threads request of this one. DriverError."""


class CaptureRecord:
    """What one graph has captured."""

    def __init__(self, before: CaptureRecord | None = None) -> None:
        """`before`: of what the graph holds already."""
        self.before = before
        self.thread = threading.get_ident()
        self.capturing = False
        self.pool: object = None  # whose memory the graph has
        self._models: dict[
            int, tuple[weakref.ref[CapturedModel], str, set[int]]
        ] = {}  # by id: itself, its name, its layers
        self._groups: list[tuple[Device, Group]] = []
        self._shown: list[torch.Tensor] = []
        self._lease = Lease()
        self._handles: list[RemovableHandle] = []
        self.noticed: set[tuple[int, tuple[int, ...] | None]] = set()  # in this capture: models by id, and layers

    def begin(self, models: Iterable[CapturedModel]) -> None:
        """What of these is called from now on is captured."""
        self.capturing = True
        for each in models:
            self._handles += each.listen()

    def end(self) -> None:
        """The capture has ended. On any thread; again: does nothing."""
        self.capturing = False
        self.noticed.clear()
        while self._handles:
            self._handles.pop().remove()
        self._lease.close()

    def add(self, model: CapturedModel, layers: Iterable[int]) -> None:
        """`layers`: the ids of their modules."""
        known = self._models.get(id(model))
        if known is None or known[0]() is not model:
            known = self._models[id(model)] = weakref.ref(model), model.name, set()
        known[2].update(layers)
        self.lease(model.device, model.group)

    def lease(self, device: Device, group: Group) -> None:
        """The group is leased while the graph is captured, and around each replay."""
        device.note_stream(stream_of(device)())
        if not any(each is group for _, each in self._groups):
            self._groups.append((device, group))
        if self.capturing:
            self._lease.enter(group)

    def show(self, tensors: Iterable[torch.Tensor]) -> None:
        """The graph reads these, which nobody else needs to keep."""
        self._shown += tensors

    def include(self, other: CaptureRecord) -> None:
        """All that the other one has captured, too."""
        for reference, _, layers in list(other._models.values()):
            model = reference()
            if model is not None and model.followed:
                self.add(model, layers)
        for device, group in list(other._groups):
            self.lease(device, group)
        self._shown += other._shown

    def layers(self, model: CapturedModel) -> frozenset[int]:
        """The ids of the modules of layers that it has captured of the model."""
        known = self._models.get(id(model))
        return frozenset() if known is None or known[0]() is not model else frozenset(known[2])

    @property
    def models(self) -> list[CapturedModel]:
        """The models of which it has captured something. ManageError where one of them is managed no more."""
        found = []
        for reference, name, _ in list(self._models.values()):
            model = reference()
            if model is None or not model.followed:
                raise ManageError(
                    f"this CUDA graph reads weights of {name}, which was released or collected since it was captured: "
                    "capture it again"
                )
            found.append(model)
        return found

    def leased(self) -> Guarded[None]:
        """Around a replay. See Note [Replays]. ManageError, DriverError."""
        lease = Lease()
        return guarded(partial(self._enter, lease), lambda failed: lease.close())

    def _enter(self, lease: Lease) -> None:
        for model in self.models:
            model.yield_pages()
        for _, group in self._groups:
            lease.enter(group)
        for each in devices.every():  # of memory that is no model's, too
            each.device.note_stream(stream_of(each.device)())

    def close(self) -> None:
        """The graph is gone. Whose layers it kept hears of that later: this may be a finalizer."""
        self.end()
        GRAPHS.loosened.extend(reference for reference, _, _ in self._models.values())
        self._shown.clear()


class _Graphs(captures.CaptureListener):
    """All graphs that were captured by torch's own class, which is one for all devices, and by others."""

    def __init__(self) -> None:
        self.records: dict[int, CaptureRecord] = {}  # by id of the graph
        self.others: dict[
            int, CaptureRecord
        ] = {}  # by id of the model: of captures that torch's class does not know of
        self.models: dict[int, weakref.ref[CapturedModel]] = {}  # those that are managed, by id
        self.loosened: deque[weakref.ref[CapturedModel]] = deque()  # of which a graph is gone; see `tell_of_dropped`

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
        for each in list(self.records.values()):
            if pool is not None and each.pool == pool and each is not record:
                _include(record, each)
        if before is not None:
            _include(record, before)
        for model in models:
            if model.here:
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
        else:  # it holds what it held, which torch does not replace
            self.records[id(graph)] = record.before
            record.close()
            tell_of_dropped()

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        record = self.records.get(id(graph))
        if record is None:
            return nullcontext()
        for outer in _here():
            _include(outer, record)
        return record.leased()

    def reset(self, graph: Any) -> None:
        _drop(id(graph))
        tell_of_dropped()


GRAPHS: Final = _Graphs()


def capturing(cuda: bool) -> bool:
    """Is what this thread does being captured? `cuda`: does it compute on a GPU?"""
    return cuda and torch.cuda.is_current_stream_capturing()


def attend(model: CapturedModel) -> None:
    """From now on what is captured of the model is noticed. Again: does nothing."""
    GRAPHS.models[id(model)] = weakref.ref(model)
    if hasattr(torch.cuda, "CUDAGraph"):
        captures.listen(GRAPHS)


def forget(model: CapturedModel) -> None:
    """Ends the management of the model: graphs that have captured some of it are not replayed from now on."""
    GRAPHS.models.pop(id(model), None)
    GRAPHS.others.pop(id(model), None)
    _leave()


def noticed(model: CapturedModel, layers: tuple[int, ...] | None = None) -> None:
    """On a thread whose stream is captured, before anything is: these layers are about to be read, with None all that
    are resident, with () what belongs to no layer. ManageError where one of them is not resident."""
    records = _here() or [GRAPHS.others.setdefault(id(model), CaptureRecord())]
    if new := [each for each in records if (id(model), layers) not in each.noticed]:
        model.keep(layers, new)
    for each in new:
        if each.capturing:  # within a capture nothing comes or goes
            each.noticed.add((id(model), layers))


def shows(device: Device, group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """On a thread whose stream is captured: these are about to be read, whose pages are leased by that group, and are
    dropped afterwards. They live as long as the graph."""
    shown = list(tensors)
    for record in _here():
        record.lease(device, group)
        record.show(shown)


def layers_of(model: CapturedModel) -> frozenset[int]:
    """The ids of the modules of the layers that graphs have captured."""
    records = [*GRAPHS.records.values(), *filter(None, [GRAPHS.others.get(id(model))])]
    return frozenset().union(*(each.layers(model) for each in records))


def why_short() -> str:
    """For a message that says that pages are missing: what graphs keep of them; empty where that is nothing."""
    kept = [(model, pages) for model in _managed() if (pages := model.kept_pages)]
    if not kept:
        return ""
    named = ", ".join(f"{format_size(pages * model.device.page_size)} of {model.name}" for model, pages in kept)
    return f". CUDA graphs keep layers on the device that they have captured ({named}): drop graphs, or reset() them"


def leases(group: Group) -> int:
    """How many captures hold one on the group now."""
    return sum(
        each.capturing and any(group is mine for _, mine in each._groups) for each in list(GRAPHS.records.values())
    )


def tell_of_dropped() -> None:
    """Models hear of graphs that are gone. Called before the next forward of any of them."""
    for _ in range(len(GRAPHS.loosened)):
        reference = GRAPHS.loosened.popleft()
        model = reference()
        if model is not None and not model.kept():
            GRAPHS.loosened.append(reference)
    if not GRAPHS.models:
        _leave()


def _here() -> list[CaptureRecord]:
    """The captures of this thread that have begun."""
    return [each for each in list(GRAPHS.records.values()) if each.capturing and each.thread == threading.get_ident()]


def _managed() -> list[CapturedModel]:
    found = (reference() for reference in list(GRAPHS.models.values()))
    return [model for model in found if model is not None and model.followed]


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
