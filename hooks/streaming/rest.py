"""What one model has outside of its layers: embeddings, the head, towers, small tensors. It leaves the device as a
whole while the model sleeps (sleep.py), or is idle and pages are short, and comes back before the next forward.

Note [Taken while idle]
    The core takes it as it takes a layer (model_residency.py, Note [Nothing is prepared]), after the model's own
    layers, as nothing hides its copy. Its addresses lead to the host then: who reads it is slow and right, who writes
    to it writes to what comes back. A model that runs does not offer it: each step would read all of the head on the
    host. What the core takes shows in where the ranges lead, so that nobody has to be told.

Note [Few rows]
    Embeddings and a head alone, of which a forward reads few rows, may stay for that one: these it reads on the host,
    as fast as the link would bring them, and they come back with the next forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ...allocator._native import Range, Transfer
from ...allocator.errors import ManageError, PoolExhausted, WeightsFileChanged
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.kv_pages import ROWS
from ...offload.policy.reclaim_order import PageSource
from ...offload.residency.ring import LayerPart, StreamedLayer, bring_back, live
from ..device.references import label
from ..device.shared import reserve
from ..weights.model_parts import TensorMember, held
from ..weights.moving import tenants_of
from ..weights.ranges import Weights, is_away


class Rest:
    """Weights outside of layers. Moved while at most the forward that begins holds a lease on the model. `on_host`: was
    any of them there at the beginning of the last forward that looked?"""

    def __init__(
        self, model: nn.Module, weights: Weights, manager: MemoryManager, captured: Callable[[], bool]
    ) -> None:
        """`captured`: do graphs read weights of the model? None of it moves then."""
        self.on_host = False
        self._patience = 0  # forwards until it is tried again to bring them back
        self._waited = False  # has a forward read them on the host, as it reads few rows?
        self._name = label(model)
        self._model = weakref.ref(model)
        self._weights = weights
        self._captured = captured
        self._manager = manager

    # -- on any thread

    @property
    def away(self) -> bool:
        """Does any of it lie on the host?"""
        return any(map(is_away, list(self._weights.ranges.get(None, ()))))

    def pages(self) -> int:
        """Device pages that it frees when it goes; 0 while any of it is away, or it must stay."""
        return (
            0
            if self.away or self._captured()
            else sum(opened.backed for opened in list(self._weights.ranges.get(None, ())))
        )

    # -- on the thread that has the model to itself

    def look(self) -> bool:
        """Notes before a forward whether any of it is away, and returns that."""
        self.on_host = self.away
        return self.on_host

    def leave(self) -> None:
        """Moves all of it to the host. Raises as `StreamedLayer.leave`."""
        transfer = Transfer(self._weights.device)
        for left in _by_range(self._weights.parts(None)):
            left.leave(transfer)

    def reveal(self) -> None:
        """Fills its addresses from its file, where that serves. Raises as `Backing.reveal`, but torch.OutOfMemoryError
        where the host has no pages for it."""
        for part in [part for left in self._left for part in left.parts]:
            if part.backing.file is not None:
                self._weights.backings.register_files()
                try:
                    part.backing.reveal(live(part.range, 0, part.range.pieces))
                except PoolExhausted as error:
                    raise torch.OutOfMemoryError(f"no room on the host for weights of {self._name}: {error}") from error

    def bring(self, call: Mapping[str, Any]) -> int:
        """Brings it back, but for what may wait for the next forward: see Note [Few rows]. `call`: the keywords of the
        one that begins, none where none does. Returns the pages that came. PoolExhausted; ManageError where addresses
        cannot be exchanged now; WeightsFileChanged, DriverError."""
        rest = self._left
        waits = not self._waited and _reads_few_rows(call, ROWS) and self._has_rows_only()
        self._waited = waits
        coming = [left for left in rest if left.hidden or not waits]
        pages, transfer = sum(left.pages for left in coming), Transfer(self._weights.device)
        self.make_room(pages)
        for left in coming:
            bring_back(self._weights.device, self._weights.group, transfer, left)
        self.look()
        return pages

    def try_to_bring(self, call: Mapping[str, Any]) -> bool:
        """Brings it back before a forward, as `bring`; where there is no room it is read on the host, and tried again
        later. Has anything moved? WeightsFileChanged, DriverError."""
        if self._patience or self._captured():
            self._patience = max(0, self._patience - 1)
            return False
        manager = self._manager
        began, seconds = manager.clock(), manager.link.page_seconds
        try:
            pages = self.bring(call)
        except WeightsFileChanged:
            raise
        except (PoolExhausted, ManageError):
            self._patience = manager.tuning.weights.again
            return True
        if pages:
            manager.events.decided(
                PageSource.IDLE_WEIGHTS.label,
                "restore",
                pages,
                what=self._name,
                predicted=None if seconds is None else pages * seconds,
                measured=manager.clock() - began,
            )
        return pages > 0

    @property
    def missing(self) -> int:
        """Device pages that it takes to have all of it back."""
        return sum(left.pages for left in self._left)

    def make_room(self, needed: int) -> None:
        """Has others give so many pages, or as many as they can."""
        device = self._weights.device
        reserve(device, lack := max(0, needed - device.available))
        if lack:
            self._manager.sources.make_room(lack, running=True)

    @property
    def _left(self) -> list[StreamedLayer]:
        """The ranges of it that are on the host."""
        return _by_range(part for part in self._weights.parts(None) if is_away(part.range))

    def _has_rows_only(self) -> bool:
        """Is it embeddings and the head, but for small tensors?"""
        model = self._model()
        assert model is not None  # a forward of it begins
        ends = set[int]()
        for name in ("get_input_embeddings", "get_output_embeddings"):
            with suppress(AttributeError, NotImplementedError):  # of modules of other kinds
                ends.update(map(id, getattr(model, name)().parameters()))
        rest = [tensor for tensors in lying(self._weights, model, (None,)).values() for tensor in tensors]
        return all(id(tensor) in ends or tensor.nbytes < self._weights.device.page_size for tensor in rest)


def lying(weights: Weights, model: nn.Module, layers: Iterable[int | None]) -> dict[Range, list[torch.Tensor]]:
    """The tensors in each range of these layers, looked up so that no access to a module is noticed."""
    ranges = [opened for layer in layers for opened in weights.ranges.get(layer, ())]
    there: dict[Range, list[torch.Tensor]] = {opened: [] for opened in ranges}
    for member, opened in tenants_of(ranges, [TensorMember(name, tensor, set()) for name, tensor in held(model)]):
        there[opened].append(member.tensor)
    return {opened: [*{id(tensor): tensor for tensor in tensors}.values()] for opened, tensors in there.items()}


def _by_range(parts: Iterable[LayerPart]) -> list[StreamedLayer]:
    """Weights outside of layers as things that stream: one for each range, as its parts share a backing."""
    streamed = list[StreamedLayer]()
    for _, group in groupby(parts, key=lambda part: part.range.address):
        of_range = list(group)
        start = of_range[0].offset
        streamed.append(StreamedLayer(-1, 0, tuple(replace(part, offset=part.offset - start) for part in of_range)))
    return streamed


def _reads_few_rows(call: Mapping[str, Any], rows: int) -> bool:
    """Does a forward with these keywords compute logits of no more tokens of each sequence than `rows`?"""
    kept = call.get("logits_to_keep")
    number = kept.numel() if isinstance(kept, torch.Tensor) else kept
    return isinstance(number, int) and 0 < number <= rows and not torch.is_grad_enabled()
