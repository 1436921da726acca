"""Recipes: what one forward of few tokens computes, written down step by step (recorder.py), to be done again.

Note [Operands]
    A step refers to what it reads by what that is, never by the tensor that it was:

        Made       a tensor that an earlier step of this forward has made, or an input that is copied in
        Fresh      what an eager call has returned in this forward: keys and values, a mask
        Given      a keyword argument of this forward as it is (the attention mask, which grows)
        WeightOperand     a parameter or buffer of the model
        Number     a scalar on the CPU, which a kernel gets by value
        THE_CACHE  the cache of this forward

    everything else is a constant. Numbers are given in the order of making, in each decoder layer and outside of them
    for itself. So two forwards that compute the same have equal recipes, whatever their lengths and whichever layers
    were away; where the length went into a constant, `difference` names the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn

OUTSIDE: Final = -1  # the block of what is in no decoder layer


class Made(NamedTuple):
    block: int  # place of the decoder layer among all, or OUTSIDE
    number: int


class Fresh(NamedTuple):
    call: tuple[int, int]  # block and number of the eager call
    leaf: int  # which of its results, flattened


class Given(NamedTuple):
    name: str


class _TheCache:
    def __repr__(self) -> str:
        return "the cache"


THE_CACHE: Final = _TheCache()


class WeightOperand:
    """A parameter or buffer, referred to weakly: kept alive by a recipe, it would hide that it was replaced."""

    __slots__ = ("facts", "reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        self.facts = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def tensor(self) -> torch.Tensor:
        """Returns the weight. LookupError where it is gone or lies elsewhere by now."""
        weight = self.reference()
        if weight is None or weight.data_ptr() != self.facts[0]:
            raise LookupError("a weight was replaced")
        return weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightOperand) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.facts)

    def __repr__(self) -> str:
        return f"weight{list(self.facts[1])} at {self.facts[0]:#x}"


class Number:
    """A scalar tensor on the CPU."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and _same_scalar(
            (self.tensor.dtype, self.tensor.item()), (other.tensor.dtype, other.tensor.item())
        )

    def __hash__(self) -> int:
        return hash(self.tensor.dtype)

    def __repr__(self) -> str:
        return repr(self.tensor.item())


class _Unread:
    """In the place of a tensor that is returned and that nothing reads, such as weights of attention."""

    def __repr__(self) -> str:
        return "nothing that is read"


UNREAD: Final = _Unread()


class Facts(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Facts:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(slots=True)
class Op:
    """An operator that a graph launches. `results`: the tensors that it makes, flattened."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Made, ...]
    facts: tuple[Facts, ...]

    def __str__(self) -> str:
        return str(self.function)


@dataclass(slots=True)
class EagerCall:
    """An eager call: cache update, mask, attention, or a module that is never captured.

    `results`: tree of what it returns: `Fresh` leaves are read by other eager calls as they are, `Made` leaves are
    copied to tensors that graphs read. `kind`: "update", "mask", "attention" or "module".
    """

    number: tuple[int, int]  # block and number
    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any = None
    facts: dict[Made, Facts] = field(default_factory=dict)  # of the `Made` leaves
    calls: Any = None  # of torch, that the function consists of, where these are known (attention.py)
    # (type, shape but for the last size, which is the length) of each tensor of a mask
    masks: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.number[1]}"


@dataclass(slots=True)
class LayerStep:
    """A decoder layer: its call, and the steps that it consists of; None where they were not seen, as it was away.
    `made`: what the call returns -> the tensor of its body that it is. `why_not_alone`: why it cannot be called by
    itself, empty where it can."""

    index: int
    call: EagerCall
    body: list[Step] | None
    made: dict[Made, Made] = field(default_factory=dict)
    why_not_alone: str = ""

    def __str__(self) -> str:
        return f"layer {self.index}"


Step = Op | EagerCall | LayerStep


class OutputFields:
    """What a model's forward returns, field by field: `kind(**fields)`."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields


@dataclass(slots=True)
class Recipe:
    """The steps of a forward. `inputs`: keyword arguments that are copied in -> what they are. `output`: tree of what
    the forward returns."""

    inputs: dict[str, Made]
    steps: list[Step]
    output: Any

    def layers(self) -> Iterator[LayerStep]:
        return (step for step in self.steps if isinstance(step, LayerStep))


def eager_calls(steps: Sequence[Step]) -> Iterator[EagerCall]:
    """Yields the eager calls of the steps, a layer's own before those of its body."""
    for step in steps:
        if isinstance(step, EagerCall):
            yield step
        elif isinstance(step, LayerStep):
            yield step.call
            yield from eager_calls(step.body or ())


def operands(tree: Any) -> Iterator[Any]:
    """Yields the leaves of a tree of operands and constants."""
    if isinstance(tree, (Made, Fresh, Given)):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from operands(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from operands(branch)
    elif isinstance(tree, OutputFields):
        yield from operands(tree.fields)
    else:
        yield tree


def rebuild(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the tree with `leaf(...)` in the place of each leaf; what has no operand stays the same object."""
    if isinstance(tree, (Made, Fresh, Given)):
        return leaf(tree)
    if isinstance(tree, tuple):
        parts = [rebuild(branch, leaf) for branch in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [rebuild(branch, leaf) for branch in tree]
    if isinstance(tree, dict):
        return {key: rebuild(branch, leaf) for key, branch in tree.items()}
    return leaf(tree)


def read_by(step: Step) -> Iterator[Made]:
    """Yields the tensors that a step reads; a layer's body is not looked at."""
    if isinstance(step, LayerStep):
        step = step.call
    yield from (leaf for leaf in operands((step.args, step.kwargs)) if isinstance(leaf, Made))


def without_unread(recipe: Recipe) -> Recipe:
    """Leaves out operators whose results nothing reads, and marks such results of eager calls: they may depend on the
    length."""
    read = {leaf for leaf in operands(recipe.output) if isinstance(leaf, Made)}
    recipe.steps = _read_steps(recipe.steps, read)
    return recipe


def _read_steps(steps: Sequence[Step], read: set[Made]) -> list[Step]:
    """Returns the steps without what is not in `read`, or read by later ones; adds what they read to it."""
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Op):
            if read.isdisjoint(step.results) and not writes(step.function):
                continue
        else:
            call = step.call if isinstance(step, LayerStep) else step
            call.results = rebuild(
                call.results, lambda leaf: UNREAD if type(leaf) is Made and leaf not in read else leaf
            )
            call.facts = {made: facts for made, facts in call.facts.items() if made in read}
            if isinstance(step, LayerStep):
                step.made = {made: inner for made, inner in step.made.items() if made in read}
                if step.body is not None:
                    read.update(step.made.values())
                    step.body = _read_steps(step.body, read)
        read.update(read_by(step))
        kept.append(step)
    return kept[::-1]


@functools.cache
def writes(function: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to: (position, name)."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def difference(first: Recipe, second: Recipe) -> str:
    """Returns in which step two forwards differ, and by what; empty where they compute the same. Layers that one of the
    two has not seen from within count as equal."""
    if first.inputs != second.inputs:
        return "the forward takes other arguments"
    return _steps_differ(first.steps, second.steps) or ("" if same(first.output, second.output) else "another output")


def _steps_differ(first: Sequence[Step], second: Sequence[Step]) -> str:
    for one, other in zip(first, second, strict=False):
        if why := _differs(one, other):
            return why
    if len(first) != len(second):
        longer = max(first, second, key=len)
        return f"{longer[min(len(first), len(second))]} is not always computed"
    return ""


def _differs(one: Step, other: Step) -> str:
    if isinstance(one, LayerStep) and isinstance(other, LayerStep):
        if one.index != other.index:
            return f"{one} comes in the place of {other}"
        if why := _differs(one.call, other.call):
            return f"{one}: {why}"
        if one.body is None or other.body is None:
            return ""
        return (why := _steps_differ(one.body, other.body)) and f"{one}: {why}"
    if isinstance(one, Op) and isinstance(other, Op):
        if one.function is not other.function:
            return f"{one} comes in the place of {other}"
        if not same((one.args, one.kwargs), (other.args, other.kwargs)):
            return f"{one} is called with {_first_other(one, other)}"
        if one.results != other.results or one.facts != other.facts:
            return f"{one} makes tensors of other shapes"
        return ""
    if isinstance(one, EagerCall) and isinstance(other, EagerCall):
        if one.kind != other.kind or not same_function(one.function, other.function):
            return f"{one} is another function"
        if not same((one.args, one.kwargs), (other.args, other.kwargs)):
            return f"{one} is called with {_first_other(one, other)}"
        if one.facts != other.facts or not same(one.results, other.results):
            return f"{one} returns something else"
        return ""
    return f"{one} comes in the place of {other}"


def same_function(one: Any, other: Any) -> bool:
    return one is other or (
        getattr(one, "__func__", one) is getattr(other, "__func__", other)
        and getattr(one, "__self__", None) is getattr(other, "__self__", None)
    )


def _first_other(one: Op | EagerCall, other: Op | EagerCall) -> str:
    for a, b in zip(operands((one.args, one.kwargs)), operands((other.args, other.kwargs)), strict=False):
        if not same(a, b):
            return f"{_short(a)} and {_short(b)}"
    return "other arguments"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def same(one: Any, other: Any) -> bool:
    """Are these trees equal?"""
    if one is other:
        return True
    if isinstance(one, nn.Module) or isinstance(other, nn.Module):
        return False
    if type(one) is not type(other):
        return False
    if isinstance(one, (Made, Fresh, Given, WeightOperand, Number)):
        return bool(one == other)
    if isinstance(one, OutputFields):
        return one.kind is other.kind and same(one.fields, other.fields)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return _same_scalar(one, other)


def _same_scalar(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_same_scalar, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()  # no number is nan, and 0.0 is not -0.0
    try:
        return bool(one == other)
    except Exception:  # of an object that cannot be compared
        return False
