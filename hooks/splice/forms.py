"""What layers need of each other: found by two forwards; and a forward that runs some of them.

Note [What travels]
    As a rule the hidden states are all that a decoder layer needs of those before it. Some need more: gemma3n and
    gemma4 keep the keys and values that later layers share in a dictionary, others hand on a second residual stream. So
    the tensors that travel are found and not assumed: a model runs once as it is and once with all its layers passing
    their input through, and the tensors of a layer's call that differ come from the layers before.
    Each is named by its path through the call. A tuple is rebuilt around a tensor that is put in; a list or a mapping
    is changed in place, because the model's loop hands the same object to the next layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn

from ...allocator.errors import SpliceError
from ..cache_argument import CACHE_NAMES, given_cache
from ..compat import Cache

# What passes between two layers: the hidden states, [batch, tokens, width] as a rule, then the other tensors that
# travel, in the order of `LayerForm.travels`
States = tuple[torch.Tensor, ...]
TreePath = tuple[str | int, ...]  # through mappings by key and sequences by index


class Call(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def leaves(
    value: object, without: frozenset[str] = frozenset(), path: TreePath = ()
) -> Iterator[tuple[TreePath, torch.Tensor]]:
    """The tensors in nested sequences and mappings, with their paths. `without`: keys of mappings that are left out."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str | int) and key not in without:
                yield from leaves(value[key], without, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, without, (*path, index))


def copied_leaves(call: Call, without: frozenset[str]) -> dict[TreePath, torch.Tensor]:
    """Returns copies of the tensors of a call, by their paths."""
    return {path: tensor.detach().clone() for path, tensor in leaves(call._asdict(), without)}


def get(value: Any, path: TreePath) -> Any:
    """Returns the value at the end of the path; None where the path does not exist."""
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def put(value: Any, path: TreePath, tensor: torch.Tensor) -> Any:
    """Returns `value` with the tensor at the end of the path. Mappings and lists are changed in place, tuples rebuilt
    and extended where needed. See Note [What travels]."""
    if not path:
        return tensor
    step, rest = path[0], path[1:]
    if isinstance(value, MutableMapping):
        value[step] = put(value.get(step), rest, tensor)
        return value
    index = cast(int, step)
    items = list(value) if isinstance(value, Sequence) else []
    items += [None] * (index + 1 - len(items))
    items[index] = put(items[index], rest, tensor)
    if isinstance(value, list):
        value[:] = items
        return value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(items)
    return tuple(items)


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Are both None, or tensors with equal bits? A NaN equals itself."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other)) or (
        one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )


@dataclass(frozen=True, slots=True)
class FromCall:
    """A returned object that was an argument of the call, at `path`."""

    path: TreePath


@dataclass(frozen=True, slots=True)
class Fixed:
    """A returned value that does not depend on the tokens, as a rule None."""

    value: object


@dataclass(frozen=True, slots=True)
class Several:
    """A returned tuple or list of such values."""

    parts: tuple[Answer, ...]
    as_list: bool


Answer = FromCall | Fixed | Several


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The form of one decoder layer. `travels`: paths in its call of the tensors that come from earlier layers, the
    hidden states first. `answer`: its result when it passes its input through."""

    travels: tuple[TreePath, ...]
    answer: Answer


def answer_of(output: object, call: Call, states: TreePath) -> Answer:
    """Returns the result that replaces `output` when the layer passes its input through: objects of its call where it
    returned these, the hidden states (at the path `states`) for a tensor like them, and None for others."""
    for path, value in _objects(call._asdict()):
        if value is output and not isinstance(output, bool | int | float | str | None):
            return FromCall(path)
    if isinstance(output, torch.Tensor):
        before = get(call._asdict(), states)
        alike = isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (output.shape, output.dtype)
        return FromCall(states) if alike else Fixed(None)
    if isinstance(output, list | tuple):
        return Several(tuple(answer_of(part, call, states) for part in output), isinstance(output, list))
    return Fixed(output if isinstance(output, bool | int | float | str) else None)


def pass_through(answer: Answer, call: Call) -> Any:
    """Returns the result of a layer that passes its input through."""
    if isinstance(answer, FromCall):
        return get(call._asdict(), answer.path)
    if isinstance(answer, Fixed):
        return answer.value
    parts = [pass_through(part, call) for part in answer.parts]
    return parts if answer.as_list else tuple(parts)


def _objects(value: object, path: TreePath = ()) -> Iterator[tuple[TreePath, object]]:
    yield path, value
    if isinstance(value, Mapping):
        for key in value:
            yield from _objects(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _objects(item, (*path, index))


@dataclass(slots=True)
class Run:
    """One forward of a stage. `given`: what the stage before has sent; None on the first one."""

    given: States | None


class Leaving(Exception):  # no error, but torch runs the hooks of modules that an Exception leaves
    """Ends a forward after the last layer of the span."""

    def __init__(self, run: Run, states: States) -> None:
        super().__init__()
        self.run = run
        self.states = states


class Now(threading.local):
    """The forward of a stage that this thread runs."""

    run: Run | None = None

    @contextmanager
    def running(self, run: Run) -> Iterator[Run]:
        """A `with` block in which this thread runs `run`."""
        before, self.run = self.run, run
        try:
            yield run
        finally:
            self.run = before


def cache_of(call: Call) -> Any:
    """The cache among the arguments of a layer; None where there is none."""
    caches = (argument for argument in (*call.args, *call.kwargs.values()) if isinstance(argument, Cache))
    return next(caches, given_cache(call.kwargs))


_CACHES: Final = frozenset(CACHE_NAMES)


class SeenLayer:
    """The arguments and the result of a layer's call."""

    def __init__(self, tensors: dict[TreePath, torch.Tensor], states: TreePath) -> None:
        self.tensors = tensors
        self.states = states  # the path of the hidden states
        self.answer: Answer = Fixed(None)


def record(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any]
) -> tuple[list[SeenLayer], Any, Any]:
    """Runs the model as it is. Returns the call of each layer, the model's result, and the cache that its layers were
    given. SpliceError where its forward does not call its layers one after the other, each once."""
    order: list[int] = []
    seen: list[SeenLayer] = []
    caches: list[Any] = []

    def before(index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        call = Call(args, kwargs)
        tensors = copied_leaves(call, _CACHES)
        caches.append(cache_of(call))
        order.append(index)
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
    return seen, output, caches[-1]


def forms_of(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any], seen: Sequence[SeenLayer]
) -> tuple[LayerForm, ...]:
    """Runs the model with all layers passing their input through, and compares with the calls that were `seen`."""
    through = _passed(model, layers, inputs, seen)
    forms = []
    for index, layer in enumerate(seen):
        more = (path for path, tensor in layer.tensors.items() if not same_bits(tensor, through[index].get(path)))
        travels = (layer.states, *(path for path in more if path != layer.states)) if index else ()
        forms.append(LayerForm(travels, layer.answer))
    return tuple(forms)


def _passed(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any], seen: Sequence[SeenLayer]
) -> dict[int, dict[TreePath, torch.Tensor]]:
    """Returns the tensors of each layer's call when all layers pass their input through."""
    calls: dict[int, dict[TreePath, torch.Tensor]] = {}

    def passing(index: int, *args: Any, **kwargs: Any) -> Any:
        calls[index] = copied_leaves(Call(args, kwargs), _CACHES)
        return pass_through(seen[index].answer, Call(args, kwargs))

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            undo.callback(_put_forward(layer, partial(passing, index)))
        model(**inputs)
    return calls


def _put_forward(layer: nn.Module, forward: Any) -> Any:
    """Replaces the layer's forward; returns the function that undoes it."""
    own = vars(layer)
    before = [own["forward"]] if "forward" in own else []
    own["forward"] = forward

    def undo() -> None:
        del own["forward"]
        own.update(("forward", forward_before) for forward_before in before)

    return undo


def _states(tensors: Mapping[TreePath, torch.Tensor], layer: int) -> TreePath:
    """Returns the path of the hidden states: the first positional argument, or the one of that name."""
    for path in (("args", 0), ("kwargs", "hidden_states")):
        if path in tensors:
            return path
    raise SpliceError(f"its layer {layer} is given no hidden states")
