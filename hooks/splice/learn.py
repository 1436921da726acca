"""Finding the forms of a model's layers: one forward as it is, and one in which all layers pass their input through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ...allocator.errors import SpliceError
from .elsewhere import marks
from .forms import Answer, LayerForm, answer_of, pass_through
from .splice import cache_of
from .trees import Call, Way, copied_leaves, same_bits


class Seen:
    """What a layer was called with, and returned."""

    def __init__(self, tensors: dict[Way, torch.Tensor], caches: tuple[object, ...]) -> None:
        """`caches`: of each layer of the cache, whether it was written to (elsewhere.py, `marks`)."""
        self.tensors = tensors
        self.caches = caches
        self.answer: Answer | None = None


def learn(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any], cache: str
) -> tuple[tuple[LayerForm, ...], Any]:
    """Returns the forms of the layers and what the model returned as it is. `cache`: what it calls its cache.
    SpliceError where its forward does not call its layers one after the other, each once."""
    order: list[int] = []
    seen: dict[int, Seen] = {}
    caches: list[Any] = []

    def before(index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        call = Call(args, kwargs)
        order.append(index)
        caches.append(cache_of(call, cache))
        seen[index] = Seen(copied_leaves(call, frozenset((cache,))), marks(caches[-1]))

    def after(index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen[index].answer = answer_of(output, Call(args, kwargs), _states(seen[index], index))

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            handle = layer.register_forward_pre_hook(partial(before, index), with_kwargs=True)
            undo.callback(handle.remove)
            undo.callback(layer.register_forward_hook(partial(after, index), with_kwargs=True).remove)
        output = model(**inputs)
    if order != [*range(len(layers))]:
        raise SpliceError(f"it calls its layers in the order {order}, and not one after the other, each once")
    written = [*(seen[index].caches for index in order), marks(caches[-1])]
    through = _passed(model, layers, inputs, cache, seen)
    forms = []
    for index in order:
        each, other = seen[index], through[index]
        states, answer = _states(each, index), each.answer
        assert answer is not None
        more = [way for way, tensor in each.tensors.items() if not same_bits(tensor, other.get(way))]
        travels = (states, *(way for way in more if way != states)) if index else ()
        forms.append(LayerForm(travels, answer, _changed(written[index], written[index + 1])))
    return tuple(forms), output


def _passed(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any], cache: str, seen: Mapping[int, Seen]
) -> dict[int, dict[Way, torch.Tensor]]:
    """The tensors of each layer's call where all layers pass their input through."""
    found: dict[int, dict[Way, torch.Tensor]] = {}

    def passing(index: int, *args: Any, **kwargs: Any) -> Any:
        found[index] = copied_leaves(Call(args, kwargs), frozenset((cache,)))
        answer = seen[index].answer
        assert answer is not None
        return pass_through(answer, Call(args, kwargs))

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            undo.callback(_put_forward(layer, partial(passing, index)))
        model(**inputs)
    return found


def _put_forward(layer: nn.Module, forward: Any) -> Any:
    """Returns what puts back what was in its place."""
    own = vars(layer)
    before = [own["forward"]] if "forward" in own else []
    own["forward"] = forward

    def undo() -> None:
        del own["forward"]
        own.update(("forward", each) for each in before)

    return undo


def _states(seen: Seen, layer: int) -> Way:
    """Where the hidden states lie: the first positional argument, or what is called so."""
    for way in (("args", 0), ("kwargs", "hidden_states")):
        if way in seen.tensors:
            return way
    raise SpliceError(f"its layer {layer} is given no hidden states")


def _changed(before: tuple[object, ...], after: tuple[object, ...]) -> tuple[int, ...]:
    empty = (0, False)
    padded = (*before, *[empty] * (len(after) - len(before)))
    return tuple(index for index, (one, other) in enumerate(zip(padded, after, strict=True)) if one != other)
