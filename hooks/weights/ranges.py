"""Weights in ranges: where a model's parameters and buffers lie in the pool, their backings beside it, host pages and
files, by the address of the range, and whether the model fits under the budget: that is checked before anything is
moved, so that the error names a budget that would be enough.

Note [Working pages]
    Beside its weights a model needs its KV cache and its activations. The check asks for what a short `generate()`
    takes, of a few tokens of one sequence. The cache: a token of a layer is at most two hidden states wide, layers
    share pages that would be mostly empty (geometry.choose), so pages are at least half full, but for the last. The
    activations: two float32 copies of the widest, as a rule the logits, which are as wide as the largest dimension of
    any weight, and a few pages for the allocator's small blocks. A longer prompt or a larger batch needs more, and
    raises torch.OutOfMemoryError where there is no more.

Note [Weights that stream]
    The addresses of a layer that streams lead to its backing; its own forward reads a slot instead (hooks/streaming).
    This module treats its ranges as any other.

Note [Whose pages they are]
    A page belongs to the tensors over it and is freed with the last of them (`auto_retire`): at once where a weight is
    given other memory (`half()`, `load_state_dict(assign=True)`) or is removed, with `release()`, or when the model is
    collected. So a view of a weight keeps its memory, and so does a weight that outlives its model. A page that several
    small tensors share stays until the last of them is freed.

Note [Which backing]
    A resident layer has a backing without pages: the addresses to which its weights go when its pages are taken. Where
    all of a range lies in weights files byte for byte, and the model was just loaded and not handed out yet, its
    backing is those files, and there is no second copy in memory until the weights are read. All others have host
    pages.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import nn

from ...allocator._native import Device, Range
from ...allocator.errors import BudgetError, ManageError
from ...allocator.interrupts import Guarded, guarded
from ...allocator.units import format_size
from ...offload.policy.layout import Block, Layout, place
from ...offload.policy.plan import Plan, Rule
from ...offload.policy.tuning import DEFAULT, WeightPlans
from ...offload.residency.backing import Backing, FileBacking, FileBackings, FileLoader, Place
from ...offload.residency.mover import Mover
from ...offload.residency.ring import LayerPart, Ring, live
from ...offload.residency.weights_file import FileSpan
from ..device import managers, streams
from ..device.managers import give_up
from ..device.shared import reserve
from . import moving
from .model_parts import TensorMember, TensorSpan, members, spans, text_config
from .moving import MoveIn, Step

_LOGITS = 2 * 4  # bytes per element: two copies in float32
Files = Mapping[int, FileSpan]  # id of a tensor -> its bytes in a file
FROM_CPU: Final[Files] = MappingProxyType({})  # of a model of the program's that lies on the CPU, and goes back there


class Vacated(NamedTuple):
    """Pages of the device and of the host in which tensors lie that no range holds any more, as their management has
    ended. They are free once those tensors are moved."""

    pages: int = 0
    host_pages: int = 0


NOTHING: Final = Vacated()


# Tokens of the short `generate()` that a model has to have room for beside its weights, a prompt and an answer of a
# line, and pages for the allocator's small blocks in it. Chosen.
_SHORT_USE: Final = 64
SMALL_BLOCKS: Final = 4


def working_pages(model: nn.Module, layers: Sequence[nn.Module], page_size: int) -> int:
    """Pages that a short use of `model` takes beside its weights; see Note [Working pages]."""
    widest = max((size for parameter in model.parameters() for size in parameter.shape), default=1)
    itemsize = max((parameter.itemsize for parameter in model.parameters()), default=1)
    configs = map(text_config, model.modules())
    hidden = next((config.hidden_size for config in configs if hasattr(config, "hidden_size")), 1)
    token = 2 * itemsize * hidden  # bytes of one layer's keys and values
    cache = -(-2 * len(layers) * _SHORT_USE * token // page_size) + 1
    return cache + -(-_SHORT_USE * widest * _LOGITS // page_size) + SMALL_BLOCKS


def layout_of(moved: Sequence[TensorSpan], still: Collection[int], page_size: int, plans: WeightPlans) -> Layout:
    """The layout of these spans, whose keys are their places in the sequence. `still`: layers that must not stream."""
    blocks = (Block(n, span.nbytes, None if span.layer in still else span.layer) for n, span in enumerate(moved))
    return place(blocks, page_size, plans.large)


def plan_under_budget(
    device: Device,
    layout: Layout,
    spans: Sequence[TensorSpan],
    working: int,
    layers: int,
    rule: Rule,
    vacated: Vacated = NOTHING,
) -> Plan:
    """Chooses which of the `layers` decoder layers stream, so that the model of `spans` can be moved in and used under
    the device's budget. Idle models give pages for all of it, others only for the least that it needs. BudgetError
    where it does not fit.

    Sources that are blocks of the pool, or `vacated`, are not counted as used by others: each is freed once it is
    copied.
    """
    page = device.page_size
    sources = sum(span.nbytes for span in spans if any(map(device.block_size, span.bases()))) // page + vacated.pages
    pages = layout.layer_pages(layers)
    own = layout.pages - sum(pages) + layout.spare(sources=sources > 0, working=working)

    def missing(wanted: int) -> int:
        """Pages that lack where layers take `wanted` pages."""
        return max(0, _used(device) - sources) + own + wanted - device.budget // page

    if missing(sum(pages)) > 0:
        device.trim()  # waits for blocks that other streams use
    reserve(device, missing(sum(pages)))
    if (lack := missing(sum(pages))) > 0:
        give_up(device, lack)  # prefixes that are only kept for later prompts
        if (lack := missing(sum(pages))) > 0:
            managers.of(device).sources.make_room(lack)
    if (lack := missing(rule.smallest(pages))) > 0:
        managers.of(device).sources.make_room(lack, running=True)
    total, others = device.budget // page, max(0, _used(device) - sources)
    fixed = others + own
    plan = rule.choose(pages, total - fixed)
    if plan is None or fixed + plan.device_pages > total:
        smallest = (fixed + rule.smallest(pages)) * page
        raise BudgetError(layout.pages * page, device.budget, smallest, others * page)
    return plan


def _used(device: Device) -> int:
    """Pages of all owners, without those that hold nothing: whoever maps pages gets idle ones first."""
    device.reap(wait=True)
    pages: dict[str, int] = device.snapshot()["pages"]
    return sum(count for owner, count in pages.items() if owner != "free") - device.idle


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


class WeightBackings:
    """The backings of one model's ranges, and the movers of bytes to and from them. A range has one backing in use, and
    may have another that is ready. See Note [Which backing]."""

    def __init__(self, device: Device) -> None:
        self.files = FileBackings(device)
        # These hold the bytes of layers that may be dropped at once; the core does not know them.
        self.ready: dict[int, Backing] = {}
        self._device = device
        self._group = device.group()  # never leased: backings may move at any time
        self._movers: dict[int, Mover] = {}
        self._moving = threading.Lock()
        self._blank: Range | None = None  # a page, see backing.py, Note [File backings]
        self._unregistered = False  # are the files of backings not registered for now?

    @property
    def host_pages(self) -> int:
        """Host pages that hold weights."""
        return sum(backing.backed for backing in self._all())

    @property
    def file_bytes(self) -> int:
        """Bytes of weights whose backings are files."""
        return sum(nbytes for file in self.in_use() for _, _, nbytes in file.copies)

    def in_use(self) -> list[FileBacking]:
        """The files of all backings."""
        return [backing.file for backing in self._all() if backing.file is not None]

    def _all(self) -> list[Backing]:
        return [*(mover.backing for mover in list(self._movers.values())), *list(self.ready.values())]

    def mover(self, opened: Range) -> Mover:
        """Returns the range's mover, a new one where its backing was closed."""
        mover = self._movers.get(opened.address)
        return self.make(opened) if mover is None or mover.backing.closed else mover

    def make(self, opened: Range, file: FileBacking | None = None) -> Mover:
        """Makes the range's mover, to a backing that has no pages or lies in `file`."""
        made = Mover(self._device, opened, self.new(opened, file), self._moving)
        before = self._movers.get(opened.address)
        if before is not None and before.backing.closed:
            self._movers.pop(opened.address, None)
        return self._movers.setdefault(opened.address, made)  # another thread may have made one

    def new(self, opened: Range, file: FileBacking | None = None) -> Backing:
        """Makes a further backing for a range."""
        blank = None if file is None else self.blank()
        return Backing(self._device, self._group, opened, "weights", file=file, blank=blank)

    def blank(self) -> Range:
        """The page that addresses lead to while a file serves. PoolExhausted, DriverError."""
        if self._blank is None:
            blank = self._device.reserve(self._device.page_size, "weights", self._group)
            (blank.map_host if self._device.host_pages else blank.map)(0, 1)
            self._blank = blank
        return self._blank

    def hide(self, opened: Range, tensors: Iterable[torch.Tensor], known: Files) -> None:
        """Has files serve for the pages of a range on the host where only `tensors` lie that are in `known`; the others
        keep their host pages. Does nothing where the files cannot be registered. ManageError where addresses cannot be
        exchanged now; WeightsFileChanged, DriverError."""
        backing, page = self.mover(opened).backing, self._device.page_size
        if backing.file is not None:
            return
        kept, places = set[int](), list[Place]()
        for span in spans(tensors, {}):
            offset = span.start - opened.address
            if (place := _in_file(span, known)) is None:
                kept.update(range(offset // page, -(-(offset + span.nbytes) // page)))
            else:
                places.append((offset, place))
        pieces = [piece for first, count in live(opened, 0, opened.pieces) for piece in range(first, first + count)]
        hidden = [piece for piece in pieces if piece not in kept]
        twin = self.files.twin(places) if places and hidden else None
        if twin is not None and twin.registered:
            backing.hide(twin, self.blank(), hidden)

    def unregister_files(self) -> None:
        """Unregisters the files of backings, which pins no memory then, until `register_files`. Nothing is copied from
        them meanwhile. DriverError."""
        self._unregistered = True
        self.files.close()

    def register_files(self) -> None:
        """Registers the files of backings again, if they are not. WeightsFileChanged; ManageError where the driver
        refuses."""
        if self._unregistered:
            for backing in self._all():
                if backing.file is not None:
                    twin = self.files.twin(backing.file.places)
                    if not twin.registered:
                        raise ManageError(f"weights cannot be read from their file: {twin.reason}. Try again")
                    backing.file = twin
            self._unregistered = False

    def back(self, opened: Range, first: int, count: int) -> bool:
        """Leads pieces to their backing, which gets host pages. False where it is a file, and need not be filled."""
        backing = self._movers[opened.address].backing
        if backing.file is None:
            backing.pages.map_host(first, count)
        backing.lead(first, count)
        return backing.file is None

    def in_files(
        self, layout: Layout, spans: Sequence[TensorSpan], streamed: Collection[int], known: Files
    ) -> dict[int, FileBacking]:
        """Returns the file backings of layers that stream, by layer, where files hold all of it. WeightsFileChanged."""
        ranges = [range_ for range_ in layout.ranges if range_.layer in streamed]
        lying = {range_.layer: [(at.offset, spans[at.block.key]) for at in range_.placements] for range_ in ranges}
        twins = {layer: self._file(at, known) for layer, at in lying.items() if layer is not None}
        return {layer: twin for layer, twin in twins.items() if twin is not None}

    def file(self, opened: Range, spans: Iterable[TensorSpan], files: Files) -> FileBacking | None:
        """The file backing of a range in which these spans lie, all of them in files; else None. WeightsFileChanged."""
        return self._file([(span.start - opened.address, span) for span in spans], files)

    def _file(self, at: Iterable[tuple[int, TensorSpan]], files: Files) -> FileBacking | None:
        """Returns the file backing of a range in which these spans lie; None where not all of them are in files that
        can be registered, or their place there is unknown."""
        places: list[Place] = []
        for offset, span in at:
            place = _in_file(span, files)
            if place is None:
                return None
            places.append((offset, place))
        twin = self.files.twin(places) if places else None
        return twin if twin is not None and twin.registered else None

    def leaving(self, ranges: Sequence[Range]) -> Guarded[None]:
        """A `with` block in which these ranges leave to backings that are ready. At the end backings of ranges that
        have not left are ready again. No page of them is taken meanwhile."""

        def begin() -> None:
            for opened in ranges:
                if (backing := self.ready.get(opened.address)) is not None and not is_away(opened):
                    backing.ready = True
                    self._movers[opened.address] = Mover(self._device, opened, backing, self._moving)
                    del self.ready[opened.address]

        def end(failed: bool) -> None:
            for opened in ranges:
                mover = self._movers.get(opened.address)
                if mover is not None and mover.backing.ready:
                    mover.backing.ready = False
                    if not is_away(opened):
                        self.ready[opened.address] = mover.backing
                        del self._movers[opened.address]

        return guarded(begin, end)

    def set_aside(self, ranges: Iterable[Range]) -> None:
        """Notes that the ranges are resident again: their backings are ready for the next time, if they were before."""
        for opened in ranges:
            if (mover := self._movers.get(opened.address)) is not None and not is_away(opened):
                if mover.backing.sums:
                    self.ready[opened.address] = mover.backing
                else:
                    mover.backing.close()
                del self._movers[opened.address]

    def forget_ready(self, ranges: Iterable[Range]) -> None:
        """Drops their ready backings, which are out of date or not needed."""
        for opened in ranges:
            if (backing := self.ready.pop(opened.address, None)) is not None:
                backing.drop()
                backing.close()
        self.files.keep(self.in_use())

    def trim(self, opened: Range) -> None:
        """Frees the backing of pieces that no tensor lies on any more."""
        if opened.address in self._movers:
            self._movers[opened.address].backing.trim(live(opened, 0, opened.pieces))

    def drop(self, address: int) -> None:
        """Closes the backings of a range. Pages under live tensors stay until those are freed."""
        if (mover := self._movers.pop(address, None)) is not None:
            mover.backing.close()
        if (ready := self.ready.pop(address, None)) is not None:
            ready.close()

    def close(self) -> None:
        """Closes all backings; the ranges are closed already."""
        self._blank = None
        self.files.close()


def is_away(opened: Range) -> bool:
    """Do the range's addresses lead to pages of another range?"""
    return any(opened.leads_to(first) == "alias" for first, _ in live(opened, 0, opened.pieces)[:1])


def _in_file(span: TensorSpan, files: Files) -> FileSpan | None:
    """Returns the span's bytes in a file, None where the file does not hold them in the order of memory."""
    joined: FileSpan | None = None
    for tensor in sorted(span.tensors, key=lambda tensor: tensor.data_ptr()):
        of_tensor = files.get(id(tensor))
        if of_tensor is None:
            return None
        start = of_tensor.start - (tensor.data_ptr() - span.start)  # the span's first byte in the file
        end = of_tensor.start + of_tensor.nbytes
        if joined is None:
            joined = FileSpan(of_tensor.file, start, end - start)
        elif joined.file is not of_tensor.file or joined.start != start:
            return None
        else:
            joined = FileSpan(joined.file, start, max(joined.start + joined.nbytes, end) - start)
    return joined if joined is not None and joined.nbytes == span.nbytes else None


class Weights:
    """The ranges that hold one model's weights, and their `backings`."""

    def __init__(
        self,
        device: Device,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        plans: WeightPlans = DEFAULT.weights,
    ) -> None:
        """`waiting`: as for `Ring`."""
        self.plans = plans
        self.device = device
        self.group = device.group()
        self.standin = device.kind == "standin"
        self.stream = streams.stream_of(device)
        self._note = streams.note_of(device)
        # By the index of the decoder layer; under None ranges of no layer, or of several.
        self.ranges: dict[int | None, list[Range]] = {}
        self.ring = Ring(device, self.group, waiting)
        self.backings = WeightBackings(device)
        self.home = streams.torch_device(device)  # where tensors go that leave the ranges
        self.freed_at_end = 0  # tensors over the ranges that were freed until the end of the last forward
        self._hosted: set[int] = set()  # addresses of ranges whose tensors are moved in on the host

    def all_ranges(self) -> list[Range]:
        return [range_ for of_layer in list(self.ranges.values()) for range_ in of_layer]

    def of(self, layers: Iterable[int]) -> list[Range]:
        """The ranges of these layers."""
        return [range_ for layer in layers for range_ in self.ranges.get(layer, ())]

    @property
    def pages(self) -> int:
        """Device pages of the ranges and of the slots, now."""
        return self._resident + self.ring.pages

    @property
    def _resident(self) -> int:
        return sum(range_.backed for range_ in self.all_ranges() if not is_away(range_))

    @property
    def vacating(self) -> Vacated:
        """The pages in which tensors will lie once the ranges are forgotten."""
        return Vacated(self._resident, self.backings.host_pages)

    def adopt(
        self,
        moved: Sequence[TensorSpan],
        working: int,
        layers: int,
        rule: Rule,
        still: Collection[int] = (),
        known: Files | None = None,
        progress: Callable[[int], object] = int,
        vacated: Vacated = NOTHING,
    ) -> Plan:
        """Moves the spans into new ranges, all or none: one for each of the `layers` decoder layers, one for tensors of
        no layer.

        `working`: pages that using the model needs beside them. `rule`: which layers stream; their weights stay on the
        host. `still`: layers that must not. `known`: tensors whose bytes are in files, of a model that was not handed
        out yet: they are read from there and not from the tensor's memory. `progress` is called with the bytes of each
        step. `vacated`: where spans lie now. Returns the plan. BudgetError before anything is moved;
        torch.OutOfMemoryError, WeightsFileChanged, DriverError, ManageError.
        """
        layout = layout_of(moved, still, self.device.page_size, self.plans)
        plan = plan_under_budget(self.device, layout, moved, working, layers, rule, vacated)
        twins = self.backings.in_files(layout, moved, plan.streamed, known or {})
        on_host = [plan.pages[layer] for layer in plan.streamed if layer not in twins]
        # of what is vacated a layer is freed once it has been copied
        check_host(self.device, max(sum(on_host) - vacated.host_pages, max(on_host, default=0)))
        made: dict[int | None, Range] = {}
        loader = FileLoader(self.device, self.backings.files, self.stream())
        move = MoveIn(self._back, self._note, {} if known is None else known, loader, progress)
        with ExitStack() as always, ExitStack() as undo:
            undo.callback(self.backings.files.keep, self.backings.in_use())
            always.callback(self._hosted.clear)
            slots = () if self.ring.streamed else plan.slot_pages
            if slots:
                undo.callback(self.ring.close)
            slot_of = dict(zip(plan.streamed, plan.slots, strict=True))
            for range_ in layout.ranges:
                if (empty := self._emptied(range_.layer, range_.nbytes)) is not None:
                    made[range_.layer] = empty
                    continue
                opened = made[range_.layer] = self.device.reserve(
                    range_.nbytes, "weights", self.group, auto_retire=True, keeps=True
                )
                undo.callback(opened.close)
                if range_.layer is not None and range_.layer in slot_of:
                    self._hosted.add(opened.address)
                    self.backings.make(opened, twins.get(range_.layer))
                    undo.callback(self.backings.drop, opened.address)
            ranges = list(made.values())
            leaving = slot_of.keys() - twins.keys()  # to host pages: their present memory serves the others

            def steps() -> Iterator[Step]:
                for leave in True, False:
                    for step in layout.steps():
                        moves = [(n, spot) for n, spot in step.moves if (layout.ranges[n].layer in leaving) == leave]
                        if moves:
                            yield [(ranges[n], spot.offset, moved[spot.block.key]) for n, spot in moves]
                self.ring.shared.make(slots)  # in pages that layers have left by now

            # New values in the place of those before: the pages stay mapped, where two steps find room without others.
            again = all(opened in self.ranges.get(layer, ()) for layer, opened in made.items())
            plenty = 2 * max((step.pages for step in layout.steps()), default=0) if again else math.inf
            moving.run(self.device, steps(), move.do, lambda step: move.undo(step, self._step_out), plenty)
            loader.finish([*self.backings.in_use(), *twins.values()])
            undo.pop_all()
        for layer, opened in made.items():
            if opened not in (lying := self.ranges.setdefault(layer, [])):
                lying.append(opened)
        return plan

    def _emptied(self, layer: int | None, nbytes: int) -> Range | None:
        """Returns the range of this size in which the layer's weights were until others replaced them. Its pages are
        still mapped, where nobody has taken them since. None of a layer that streams, or where there is none."""
        if layer in self.ring.streamed or layer in self.on_host():
            return None
        pieces = -(-nbytes // self.device.page_size)
        for opened in self.ranges.get(layer, ()):
            if opened.pieces == pieces and not opened.backed:
                self.device.reap(wait=True)  # whoever read the weights before has done so
                if not opened.backed:
                    self.backings.drop(opened.address)
                    return opened
        return None

    def parts(self, layer: int | None) -> tuple[LayerPart, ...]:
        """The ranges of a layer, with None of what is in no layer, with their movers."""
        parts: list[LayerPart] = []
        for opened in list(self.ranges.get(layer, ())):  # a copy, as a finalizer may empty it at any moment
            if not opened.backed:
                continue
            mover = self.backings.mover(opened)
            for first, count in live(opened, 0, opened.pieces):
                offset = sum(part.count for part in parts)
                parts.append(LayerPart(opened, mover, offset, first, count))
        return tuple(parts)

    def away(self) -> tuple[int, ...]:
        """The layers that have no device pages of their own."""
        back = self.ring.own.back
        return tuple(layer for layer in self.on_host() if layer not in back)

    def on_host(self) -> tuple[int, ...]:
        """The layers whose addresses lead to a backing."""
        return tuple(
            sorted(
                layer for layer, ranges in list(self.ranges.items()) if layer is not None and any(map(is_away, ranges))
            )
        )

    def layer_pages(self, layers: int) -> tuple[int, ...]:
        """Returns the pages of each of so many decoder layers that can be streamed."""
        return tuple(sum(range_.backed for range_ in self.ranges.get(layer, ())) for layer in range(layers))

    def use(self, layer: int | None) -> None:
        """Tells the core that this thread is about to read the weights of `layer`, with None those of no layer."""
        if opened := self.ranges.get(layer):
            stream = 0 if self.standin else self.stream()
            for range_ in opened:
                range_.note_use(stream, False)

    def sort(self, tenants: Iterable[tuple[TensorMember, Range]]) -> None:
        """Finds out anew which layer each range belongs to, and closes empty ranges.

        A range under None stays there: it holds tensors that are too small to stream.
        """
        users: dict[int, set[int | None]] = {}
        for member, opened in tenants:
            users.setdefault(opened.address, set()).update(member.layers)
        before, self.ranges = self.ranges, {}
        for layer, ranges in before.items():
            for opened in ranges:
                layers = {None} if layer is None else users.get(opened.address, {None})
                if opened.backed:
                    self.ranges.setdefault(layers.pop() if len(layers) == 1 else None, []).append(opened)
                    self.backings.trim(opened)
                else:
                    opened.close()
                    self.backings.drop(opened.address)

    def restore(self, model: nn.Module) -> None:
        """Moves every tensor of `model` that lies in a range out of it, wherever in the model it is by now.

        To `home`: on the stand-in torch's own memory, on CUDA blocks of torch's allocator, or the CPU where the model
        was taken from there. All or none: raises
        torch.OutOfMemoryError, DriverError, WeightsFileChanged or ManageError with the weights in the pool as before.
        """
        try:
            moving.run(self.device, self._steps_out(model), do=self._step_out, undo=self._step_back_in)
        finally:
            self._hosted.clear()
        self.forget()

    def forget(self) -> None:
        """Closes every range. Pages under a live tensor stay until it is freed."""
        for opened in self.all_ranges():
            opened.close()
            self.backings.drop(opened.address)
        self.ranges.clear()
        self.ring.close()
        self.backings.close()

    def _back(self, opened: Range, first: int, count: int) -> bool:
        """Maps pages to pieces, of the device or of the backing. False where they need not be filled."""
        if opened.address not in self._hosted:
            opened.map(first, count)
            return True
        return self.backings.back(opened, first, count)

    def _steps_out(self, model: nn.Module) -> list[Step]:
        """Returns the steps that empty the ranges: layers first, whose pages serve the rest, which moves one by one."""
        tenants = moving.tenants_of(self.all_ranges(), members(model, ()))
        range_of = {id(member.tensor): opened for member, opened in tenants}
        layer_of = {opened.address: layer for layer, ranges in self.ranges.items() for opened in ranges}
        layers: dict[int, Step] = {}
        resident: list[Step] = []
        for span in spans([member.tensor for member, _ in tenants], {}):
            opened = range_of[id(span.tensors[0])]
            move = (opened, span.start - opened.address, span)
            layer = layer_of[opened.address]
            if layer is None:
                resident.append([move])
            else:
                layers.setdefault(layer, []).append(move)
        return [*layers.values(), *resident]

    def _step_out(self, step: Step) -> None:
        for layer, ranges in self.ranges.items():
            if layer is not None and step[0][0] in ranges:
                self.ring.reveal(layer)  # one at a time: reading a file backing takes host pages
        self._hosted.update(opened.address for opened, _, _ in step if is_away(opened))
        moving.out(self.device, step, self._note, self.home)

    def _step_back_in(self, step: Step) -> None:
        with moving.swapping() as pairs:
            for opened, offset, span in step:
                first = offset // self.device.page_size
                self._back(opened, first, -(-(offset + span.nbytes) // self.device.page_size) - first)
                flat = moving.flat_over(opened, offset, span.nbytes)
                moving.copy(span, flat)
                pairs.extend(zip(span.tensors, span.over(flat), strict=True))
                del flat
