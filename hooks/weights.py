"""Weights in ranges: moving a model's parameters and buffers into the pool, and back out.

Note [Moving a model]
    Objects stay, memory moves: a tensor keeps its identity, its names, its gradient and its hooks, and `tensor.data` is
    pointed at other bytes, as `Module.to` does. The move goes step by step (a layer, or one block of no layer): map the
    pages, copy, swap, let go of the source, and give the source's pages back before the next step, so that no more than
    one step exists twice even where the sources lie in the same pool. A step that fails has changed nothing, and those
    before it are undone in reverse. Moving out is the same with the sides exchanged.

Note [Weights that stream]
    The addresses of a layer that streams lead to its twin, a range of host pages, which is where its weights are; what
    happens when it runs is told in streaming.py. Everything here treats it as any other range.

Note [Whose pages they are]
    A page belongs to the tensors over it and goes with the last of them (`auto_retire`): at once where a weight is
    given other memory (`half()`, `load_state_dict(assign=True)`) or is removed, with `release()`, when the model is
    collected. So a view that someone took of a weight keeps its memory, and so does a weight that outlives its model. A
    page that several small tensors share stays until none of them needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from ..allocator import install
from ..allocator._native import Device, Range
from ..allocator.errors import ManageError, PoolExhausted
from ..offload.layout import Block, place
from ..offload.plan import Plan, Rule
from ..offload.ring import Part, live
from . import room
from .storages import Member, Span, has_bytes, members, spans

_UINT8 = (1, 8)  # DLPack's code and bits

Step = list[tuple[Range, int, Span]]  # (range, offset in it, what lies or goes there), moved together
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Weights:
    """The ranges that hold one model's weights."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.group = device.group()
        self._note = note_of(device)
        self.stream = stream_of(device)
        # Of each decoder layer by its index; under None those of no layer, or of several.
        self.ranges: dict[int | None, list[Range]] = {}
        self._made = 0  # storages over the ranges, so far
        self._twins: dict[int, Range] = {}  # of the ranges that stream, by their address: where their pages are

    def all_ranges(self) -> list[Range]:
        return [each for of_layer in list(self.ranges.values()) for each in of_layer]

    @property
    def pages(self) -> int:
        """Device pages that are behind the ranges now; of ranges that stream there are none."""
        return sum(each.backed for each in self.all_ranges() if each.address not in self._twins)

    @property
    def storages(self) -> int:
        """Storages that lie over the ranges, whoever uses them."""
        return self._made - self.group.unpinned

    @property
    def host_pages(self) -> int:
        """Host pages that hold the weights of layers that stream."""
        return sum(twin.backed for twin in self._twins.values())

    def adopt(self, found: Sequence[Span], working: int, layers: int, rule: Rule) -> Plan:
        """Moves the spans into new ranges, all or none: one for each of the `layers` decoder layers, one for what
        belongs to no layer.

        `working`: pages that using the model needs beside them. `rule`: which layers stream; their weights go to the
        host, and their addresses lead there. Returns what was planned. BudgetError before anything is moved;
        torch.OutOfMemoryError, DriverError, ManageError.
        """
        blocks = (Block(n, span.nbytes, span.layer) for n, span in enumerate(found))
        layout = place(blocks, self.device.page_size)
        plan = room.demand(self.device, layout, found, working, layers, rule)
        made: list[Range] = []
        with ExitStack() as undo:
            for each in layout.ranges:
                made.append(self.device.reserve(each.nbytes, "weights", self.group, auto_retire=True))
                undo.callback(made[-1].close)
                if each.layer in plan.streamed:
                    self._twins[made[-1].address] = self.device.reserve(each.nbytes, "weights", self.group)
                    undo.callback(self._drop_twin, made[-1].address)
            self._run(
                ([(made[n], spot.offset, found[spot.block.key]) for n, spot in step.moves] for step in layout.steps()),
                do=self._step_in,
                undo=self._step_out,
            )
            undo.pop_all()
        for each, opened in zip(layout.ranges, made, strict=True):
            self.ranges.setdefault(each.layer, []).append(opened)
        return plan

    def streamed(self) -> dict[int, tuple[Part, ...]]:
        """The layers that stream, each with those of its ranges that do."""
        found: dict[int, tuple[Part, ...]] = {}
        for layer, ranges in sorted((layer, ranges) for layer, ranges in self.ranges.items() if layer is not None):
            parts: list[Part] = []
            for opened in ranges:
                twin = self._twins.get(opened.address)
                if twin is not None:
                    for first, count in live(opened, 0, opened.pieces):
                        parts.append(Part(opened, twin, sum(part.count for part in parts), first, count))
            if parts:
                found[layer] = tuple(parts)
        return found

    def streaming(self) -> frozenset[int]:
        """The layers that streamed at the last `sort`, whatever is left of their tensors."""
        return frozenset(
            layer
            for layer, ranges in self.ranges.items()
            if layer is not None and any(opened.address in self._twins for opened in ranges)
        )

    def use(self, layer: int | None) -> None:
        """This thread is about to read the weights of `layer`, with None those of no layer."""
        for opened in self.ranges.get(layer, ()):
            opened.note_use(self.stream(), False)

    def sort(self, tenants: Iterable[tuple[Member, Range]]) -> None:
        """Finds out anew which layer each range belongs to, and closes those that nothing is left of.

        What was resident once stays so: it holds what is too small to be streamed.
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
                    self._trim_twin(opened)
                else:
                    opened.close()
                    self._drop_twin(opened.address)

    def restore(self, model: nn.Module) -> None:
        """Moves out whatever tensor of `model` lies in a range now, wherever in the model it has got to meanwhile.

        On the stand-in it goes to torch's own memory, on CUDA to blocks of torch's allocator. All or none: raises
        torch.OutOfMemoryError, DriverError or ManageError with the weights in the pool as before.
        """
        self._run(self._steps_out(model), do=self._step_out, undo=self._step_in)
        self.forget()

    def forget(self) -> None:
        """Lets go of every range. Where a tensor still lies, the pages stay until it is gone."""
        for opened in self.all_ranges():
            opened.close()
            self._drop_twin(opened.address)
        self.ranges.clear()

    def _trim_twin(self, opened: Range) -> None:
        """Gives the host pages back that a range with fewer tensors than before needs no more."""
        twin = self._twins.get(opened.address)
        if twin is not None and opened.backed < twin.backed:
            needed = {first + n for first, count in live(opened, 0, opened.pieces) for n in range(count)}
            for piece in range(twin.pieces):
                if piece not in needed:
                    twin.retire(piece, 1)

    def _drop_twin(self, address: int) -> None:
        """Pages of it that tensors still show stay until those are gone."""
        twin = self._twins.pop(address, None)
        if twin is not None:
            twin.close()

    def _back(self, opened: Range, first: int, count: int) -> None:
        """Puts pages behind pieces: of the device, or where the range streams of its twin."""
        twin = self._twins.get(opened.address)
        if twin is None:
            opened.map(first, count)
        else:
            twin.map_host(first, count)
            opened.alias(first, twin, first, count)

    def _steps_out(self, model: nn.Module) -> list[Step]:
        """What lies in the ranges: layers first, whose pages are room for the rest, which goes one by one."""
        tenants = tenants_of(self.all_ranges(), members(model, ()))
        home = {id(member.tensor): opened for member, opened in tenants}
        layer_of = {opened.address: layer for layer, ranges in self.ranges.items() for opened in ranges}
        layers: dict[int, Step] = {}
        resident: list[Step] = []
        for span in spans([member.tensor for member, _ in tenants], {}):
            opened = home[id(span.tensors[0])]
            move = (opened, span.start - opened.address, span)
            layer = layer_of[opened.address]
            if layer is None:
                resident.append([move])
            else:
                layers.setdefault(layer, []).append(move)
        return [*layers.values(), *resident]

    def _run(self, steps: Iterable[Step], do: Callable[[Step], None], undo: Callable[[Step], None]) -> None:
        done: list[Step] = []
        try:
            for step in steps:
                do(step)
                done.append(step)
                # The pages of what was let go of are room for the next step, once the copies from them are done.
                self.device.trim()
                self.device.reap(wait=True)
        except BaseException as error:
            with _noted(error):
                for step in reversed(done):
                    undo([(opened, offset, next(spans(span.tensors, {}))) for opened, offset, span in step])
            if isinstance(error, PoolExhausted):
                raise torch.OutOfMemoryError(f"ballonet found no room to move a model's weights: {error}") from error
            raise

    def _step_in(self, step: Step) -> None:
        for opened, offset, span in step:
            first = offset // self.device.page_size
            self._back(opened, first, -(-(offset + span.nbytes) // self.device.page_size) - first)
        with _swapping() as pairs:
            for opened, offset, span in step:
                self._note(opened.address + offset, span.nbytes, True)
                capsule = opened.tensor(offset, (span.nbytes,), (1,), *_UINT8)
                self._made += 1
                _copy(span, from_dlpack(capsule), pairs)

    def _step_out(self, step: Step) -> None:
        with _swapping() as pairs:
            for _, _, span in step:
                self._note(span.start, span.nbytes, False)
                with torch_memory(self.device):
                    flat = torch.empty(span.nbytes, dtype=torch.uint8, device=torch_device(self.device))
                _copy(span, flat, pairs)
                del flat


def tenants_of(ranges: Iterable[Range], found: Iterable[Member]) -> list[tuple[Member, Range]]:
    """Those that lie in one of the ranges, each with its range."""
    ordered = sorted(ranges, key=lambda opened: opened.address)
    bounds = [(opened.address, opened.address + opened.nbytes) for opened in ordered]
    result = []
    for member in found:
        if has_bytes(member.tensor):
            address = member.tensor.data_ptr()
            n = bisect_right(bounds, address, key=lambda each: each[0]) - 1
            if n >= 0 and address < bounds[n][1]:
                result.append((member, ordered[n]))
    return result


def torch_device(device: Device) -> torch.device:
    """Where the tensors of `device` are for torch."""
    return torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")


def torch_memory(device: Device) -> AbstractContextManager[None]:
    """Within it, what this thread allocates on the CPU comes from torch's own allocator. Changes nothing on CUDA."""
    return install.stock() if device.kind == "standin" else nullcontext()


def stream_of(device: Device) -> Callable[[], int]:
    """What returns this thread's current stream."""
    if device.kind == "standin":
        return lambda: 0
    return lambda: int(torch.cuda.current_stream(device.ordinal).cuda_stream)


def note_of(device: Device) -> Callable[[int, int, bool], None]:
    """What tells the device that this thread's current stream uses (address, bytes, whether it writes)."""
    stream = stream_of(device)
    if device.kind == "standin":
        return lambda address, nbytes, write: device.note_use(address, nbytes, 0, write)
    return lambda address, nbytes, write: device.note_stream(stream())


def _copy(span: Span, flat: torch.Tensor, pairs: Pairs) -> None:
    """Copies the span's bytes to `flat` and lists each of its tensors with its like over that."""
    for offset, source in span.sources():
        flat[offset : offset + source.numel()].copy_(source)
    pairs.extend(zip(span.tensors, span.over(flat), strict=True))


@contextmanager
def _swapping() -> Iterator[Pairs]:
    """At the end points each tensor that was listed at the bytes of the other, all or none.

    The lists are emptied in any case: a traceback that someone keeps must not keep the memory of what failed.
    """
    pairs: Pairs = []
    before: Pairs = []
    try:
        yield pairs
        for tensor, new in pairs:
            before.append((tensor, _exchange(tensor, new)))
    except BaseException:
        for tensor, old in reversed(before):
            tensor.data = old
        raise
    finally:
        pairs.clear()
        before.clear()


def _exchange(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Gives the tensor the memory of the other and returns what it had. ManageError where its class does not allow."""
    try:
        old = tensor.data
        tensor.data = new
    except Exception as error:
        raise ManageError(
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} of shape {tuple(tensor.shape)} does not let its "
            f"memory be exchanged ({error}): a model with such weights cannot be managed"
        ) from error
    return old


@contextmanager
def _noted(error: BaseException) -> Iterator[None]:
    """Undoing after `error`: should that fail too, `error` is still what is raised, and says so."""
    try:
        yield
    except Exception as second:
        error.add_note(f"and some weights could not be moved back, they are whole where they are: {second}")
