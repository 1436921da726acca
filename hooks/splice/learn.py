"""Finding the forms of a model's layers: one forward as it is, and one in which all layers pass their input through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ...allocator.errors import SpliceError
from ..cache_argument import CACHE_NAMES
from .elsewhere import marks
from .forms import (
    Answer,
    Call,
    Fixed,
    LayerForm,
    Logits,
    TreePath,
    answer_of,
    cache_of,
    copied_leaves,
    pass_through,
    same_bits,
)

_CACHES: Final = frozenset(CACHE_NAMES)


class SeenLayer:
    """The arguments and the result of a layer's call."""

    def __init__(self, tensors: dict[TreePath, torch.Tensor], states: TreePath) -> None:
        self.tensors = tensors
        self.states = states  # the path of the hidden states
        self.answer: Answer = Fixed(None)
        self.caches: tuple[int, ...] = ()  # the layers of the cache that it has written to


def record(model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any]) -> tuple[list[SeenLayer], Logits]:
    """Runs the model as it is. Returns the call of each layer, and the model's result. SpliceError where its forward
    does not call its layers one after the other, each once."""
    order: list[int] = []
    seen: list[SeenLayer] = []
    written: list[tuple[object, ...]] = []
    caches: list[Any] = []

    def before(index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        call = Call(args, kwargs)
        tensors = copied_leaves(call, _CACHES)
        order.append(index)
        caches.append(cache_of(call))
        written.append(marks(caches[-1]))
        seen.append(SeenLayer(tensors, _states(tensors, index)))

    def after(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen[-1].answer = answer_of(output, Call(args, kwargs), seen[-1].states)

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            undo.callback(layer.register_forward_pre_hook(partial(before, index), with_kwargs=True).remove)
            undo.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
        output = model(**inputs)
    if order != [*range(len(layers))]:
        raise SpliceError(f"it calls its layers in the order {order}, and not one after the other, each once")
    for each, one, other in zip(seen, written, [*written[1:], marks(caches[-1])], strict=True):
        each.caches = _changed(one, other)
    return seen, Logits(output, caches[-1])


def forms_of(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any], seen: Sequence[SeenLayer]
) -> tuple[LayerForm, ...]:
    """Runs the model with all layers passing their input through, and compares with the calls that were `seen`."""
    through = _passed(model, layers, inputs, seen)
    forms = []
    for index, each in enumerate(seen):
        more = (path for path, tensor in each.tensors.items() if not same_bits(tensor, through[index].get(path)))
        travels = (each.states, *(path for path in more if path != each.states)) if index else ()
        forms.append(LayerForm(travels, each.answer, each.caches))
    return tuple(forms)


def _passed(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any], seen: Sequence[SeenLayer]
) -> dict[int, dict[TreePath, torch.Tensor]]:
    """Returns the tensors of each layer's call when all layers pass their input through."""
    found: dict[int, dict[TreePath, torch.Tensor]] = {}

    def passing(index: int, *args: Any, **kwargs: Any) -> Any:
        found[index] = copied_leaves(Call(args, kwargs), _CACHES)
        return pass_through(seen[index].answer, Call(args, kwargs))

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            undo.callback(_put_forward(layer, partial(passing, index)))
        model(**inputs)
    return found


def _put_forward(layer: nn.Module, forward: Any) -> Any:
    """Replaces the layer's forward; returns the function that undoes it."""
    own = vars(layer)
    before = [own["forward"]] if "forward" in own else []
    own["forward"] = forward

    def undo() -> None:
        del own["forward"]
        own.update(("forward", each) for each in before)

    return undo


def _states(tensors: Mapping[TreePath, torch.Tensor], layer: int) -> TreePath:
    """Returns the path of the hidden states: the first positional argument, or the one of that name."""
    for path in (("args", 0), ("kwargs", "hidden_states")):
        if path in tensors:
            return path
    raise SpliceError(f"its layer {layer} is given no hidden states")


def _changed(before: tuple[object, ...], after: tuple[object, ...]) -> tuple[int, ...]:
    empty = (0, False)
    padded = (*before, *[empty] * (len(after) - len(before)))
    return tuple(index for index, (one, other) in enumerate(zip(padded, after, strict=True)) if one != other)
