"""Weights in ranges: moving a model's parameters and buffers into the pool, and back out.

Note [Moving a model]
    Objects stay, memory moves: a tensor keeps its identity, its names, its gradient and its hooks, and `tensor.data` is
    pointed at other bytes, as `Module.to` does. The move goes step by step (a layer, or one block of no layer): map the
    pages, copy, swap, let go of the source, and give the source's pages back before the next step, so that no more than
    one step exists twice even where the sources lie in the same pool. A step that fails has changed nothing, and those
    before it are undone in reverse. Moving out is the same with the sides exchanged. No page is taken from under a
    tensor: a piece that is given up is retired when the last tensor over it is gone. So a view that someone took of a
    weight keeps its memory, and so does a weight that outlives its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from ..allocator import install
from ..allocator._native import Device
from ..allocator.errors import PoolExhausted
from ..offload.layout import Block, Layout, place
from . import room
from .storages import Span, plain_tensors, spans, survey

_UINT8 = (1, 8)  # DLPack's code and bits

Step = list[tuple[int | None, int, Span]]  # (layer of the range, offset in it, what lies or goes there), moved together
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def adopt(model: nn.Module, layers: Sequence[nn.Module], device: Device) -> Weights:
    """Moves every parameter and buffer of `model` into ranges of `device`, all or none; each of `layers` gets its own.

    Raises WrongDevice and ManageError (see `survey`) and BudgetError before anything is moved; torch.OutOfMemoryError,
    DriverError.
    """
    found = survey(model, layers, torch_device(device))
    layout = place((Block(n, span.nbytes, span.layer) for n, span in enumerate(found.spans)), device.page_size)
    room.demand(device, layout, found.spans, room.working_pages(model, layers, device.page_size))
    weights = Weights(device, layout, found.left)
    try:
        weights.move_in(
            [(layout.ranges[index].layer, spot.offset, found.spans[spot.block.key]) for index, spot in step.moves]
            for step in layout.steps()
        )
    except BaseException:
        weights.forget()
        raise
    return weights


class Weights:
    """The ranges that hold one model's weights."""

    def __init__(self, device: Device, layout: Layout, left: Mapping[str, str]) -> None:
        """Reserves the addresses. `left`: name of a tensor that stays where it is -> why."""
        self.device = device
        self.left = dict(left)
        self.group = device.group()
        self.note = note_of(device)
        # Of each decoder layer by its index, and the resident range under None.
        self.ranges = {each.layer: device.reserve(each.nbytes, "weights", self.group) for each in layout.ranges}

    @property
    def pages(self) -> int:
        return sum(opened.pieces for opened in self.ranges.values())

    def move_in(self, steps: Iterable[Step]) -> None:
        """Moves spans into the ranges, all or none. torch.OutOfMemoryError, DriverError."""
        self._run(steps, self._step_in, self._step_out)

    def restore(self, model: nn.Module) -> None:
        """Moves out whatever tensor of `model` lies in a range now, wherever in the model it has got to meanwhile.

        On the stand-in it goes to torch's own memory, on CUDA to blocks of torch's allocator. All or none: raises
        torch.OutOfMemoryError or DriverError with the weights in the pool as before.
        """
        self._run(self._tenants(model), self._step_out, self._step_in)
        self.forget()

    def forget(self) -> None:
        """Lets go of every range. Where a tensor still lies, the pages stay until it is gone."""
        for opened in self.ranges.values():
            opened.close()
        self.ranges.clear()

    def _tenants(self, model: nn.Module) -> list[Step]:
        """What lies in the ranges: layers first, whose pages are room for the rest, which goes one by one."""
        layers: dict[int, Step] = {}
        resident: list[Step] = []
        for span in spans(plain_tensors(model), {}):
            for layer, opened in self.ranges.items():
                offset = span.start - opened.address
                if 0 <= offset < opened.nbytes:
                    if layer is None:
                        resident.append([(layer, offset, span)])
                    else:
                        layers.setdefault(layer, []).append((layer, offset, span))
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
                    undo([(layer, offset, next(spans(span.tensors, {}))) for layer, offset, span in step])
            if isinstance(error, PoolExhausted):
                raise torch.OutOfMemoryError(f"ballonet found no room to move a model's weights: {error}") from error
            raise

    def _step_in(self, step: Step) -> None:
        for layer, offset, span in step:
            self.ranges[layer].map(*self._pieces(offset, span))
        with _swapping() as pairs:
            for layer, offset, span in step:
                self.note(self.ranges[layer].address + offset, span.nbytes, True)
                capsule = self.ranges[layer].tensor(offset, (span.nbytes,), (1,), *_UINT8)
                _copy(span, from_dlpack(capsule), pairs)

    def _step_out(self, step: Step) -> None:
        with _swapping() as pairs:
            for _, _, span in step:
                self.note(span.start, span.nbytes, False)
                with torch_memory(self.device):
                    flat = torch.empty(span.nbytes, dtype=torch.uint8, device=torch_device(self.device))
                _copy(span, flat, pairs)
                del flat
        for layer, offset, span in step:
            self.ranges[layer].retire(*self._pieces(offset, span))

    def _pieces(self, offset: int, span: Span) -> tuple[int, int]:
        """(first, count) of the pieces under the span."""
        first = offset // self.device.page_size
        return first, -(-(offset + span.nbytes) // self.device.page_size) - first


def torch_device(device: Device) -> torch.device:
    """Where the tensors of `device` are for torch."""
    return torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")


def torch_memory(device: Device) -> AbstractContextManager[None]:
    """Within it, what this thread allocates on the CPU comes from torch's own allocator. Changes nothing on CUDA."""
    return install.stock() if device.kind == "standin" else nullcontext()


def note_of(device: Device) -> Callable[[int, int, bool], None]:
    """What tells the device that this thread's current stream uses (address, bytes, whether it writes)."""
    if device.kind == "standin":
        return lambda address, nbytes, write: device.note_use(address, nbytes, 0, write)
    return lambda address, nbytes, write: device.note_stream(torch.cuda.current_stream(device.ordinal).cuda_stream)


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
            old = tensor.data
            tensor.data = new
            before.append((tensor, old))
    except BaseException:
        for tensor, old in reversed(before):
            tensor.data = old
        raise
    finally:
        pairs.clear()
        before.clear()


@contextmanager
def _noted(error: BaseException) -> Iterator[None]:
    """Undoing after `error`: should that fail too, `error` is still what is raised, and says so."""
    try:
        yield
    except Exception as second:
        error.add_note(f"and some weights could not be moved back, they are whole where they are: {second}")
