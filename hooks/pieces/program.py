"""Programs: a recipe as CUDA graphs and the eager calls between them.

Note [Owned]
    Every tensor that crosses a cut (inputs, q, k and v, residuals, cos and sin, results of eager calls, what a layer
    returns) belongs to the program for as long as it lives; what is made and used within one graph does not, and its
    memory serves the graphs that are captured after it. A layer that was away when the others were captured is captured
    later into the same memory: what crosses is never lent, and nothing within a graph is read by another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload

from ..kv.layer import ElasticLayer
from .attention import as_one_function, makes_no_mask
from .batch import attend
from .graph_pool import GraphPool
from .recipe import (
    OUTSIDE,
    THE_CACHE,
    UNREAD,
    EagerCall,
    Facts,
    Fresh,
    Given,
    LayerStep,
    Made,
    Number,
    Op,
    OutputFields,
    Recipe,
    Step,
    WeightOperand,
    eager_calls,
    operands,
    read_by,
    rebuild,
    same,
)
from .recorder import OUTPUT, ForwardRecorder

_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INITIAL: Final = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))  # fill nothing


class Stale(RuntimeError):
    """A program does not fit a forward."""


class BrokenOff(Exception):
    """A forward by a program ended before its end, for `__cause__`, and can be computed on from there. `done`: its
    eager calls so far, with copies of what they returned."""

    def __init__(self, done: Sequence[tuple[EagerCall, Any]]) -> None:
        super().__init__()
        self.done = done


class Forward:
    """One forward by a program: its cache, its keyword arguments, the layers that run on their own, what its eager
    calls have returned so far, and where it was broken off in a layer (the step, and whether its eager call had begun).
    """

    __slots__ = ("away", "broken_at", "cache", "fresh", "given", "layers")

    def __init__(self, cache: Any, given: Mapping[str, Any], away: Container[int]) -> None:
        self.cache = cache
        self.layers = getattr(cache, "layers", ())
        self.given = given
        self.away = away
        self.fresh: dict[tuple[int, int], Any] = {}
        self.broken_at: tuple[int, bool] | None = None


Act = Callable[[Forward], object]
Replay = Callable[[], object]
Acts = list[tuple[Replay | None, Act | None]]  # (replays a graph, makes an eager call), in order


class _EagerCall:
    """An eager call of a program. `act(forward)` makes it; `put(forward, result)` takes what another one returned."""

    def __init__(self, program: Program, call: EagerCall) -> None:
        self.call = call
        self.cuts = [(made, program.tensors[made]) for made in read_by(call)]
        self._targets: dict[Any, torch.Tensor] = {made: program.tensors[made] for made in call.facts}
        self._places = list(operands(call.results))
        function, args, kwargs = call.function, program.bound(call.args), program.bound(call.kwargs)
        positional, named = _maker(args), _maker(kwargs)
        self._whole: Act = lambda forward: self.put(forward, function(*positional(forward), **named(forward)))
        self._quick = self._update_act(program, function, args, kwargs) or self._attention_act(program)
        self.act: Act | None = self._quick or self._whole
        new = program.new_tokens
        if new == 1 and makes_no_mask(call):
            self.act = None

    def put(self, forward: Forward, result: Any) -> None:
        """Takes what the call has returned: copies what graphs read. Stale where a mask has come, gone, or another
        shape."""
        if self.call.kind == "update":
            forward.fresh[self.call.number] = result
        elif self.call.kind == "mask":
            masks = [leaf for leaf in operands(result) if isinstance(leaf, torch.Tensor)]
            if len(masks) != len(self.call.masks) or any(
                mask.dtype != dtype or mask.shape[:-1] != shape
                for mask, (dtype, shape) in zip(masks, self.call.masks, strict=True)
            ):
                raise Stale(f"{self.call} returned another kind of mask")
            forward.fresh[self.call.number] = masks
        else:
            for leaf, place in zip(operands(result), self._places, strict=True):
                if (target := self._targets.get(place)) is not None:
                    self._copy(target, leaf)

    def _copy(self, target: torch.Tensor, result: torch.Tensor) -> None:
        if result.shape != target.shape:
            raise Stale(f"{self.call} returned {list(result.shape)} in the place of {list(target.shape)}")
        target.copy_(result)

    def result(self, forward: Forward) -> Any:
        """Returns a copy of what the call has returned in this forward."""

        def leaf(value: Any) -> Any:
            if isinstance(value, Made):
                return self._targets[value].clone() if value in self._targets else None
            if isinstance(value, Fresh):
                return forward.fresh[value.call][value.leaf]
            if isinstance(value, Given):
                name, _, kind = value.name.partition(".")
                return forward.given[name][kind] if kind else forward.given[name]
            return forward.cache if value is THE_CACHE else None if value is UNREAD else value

        return rebuild(self.call.results, leaf)

    def may_be_made_again(self, forward: Forward, error: BaseException) -> bool:
        """Says whether the call, which raised this, has changed nothing."""
        if self.call.function is attend:  # of a loop's step, which updates the cache as well
            return False
        if isinstance(error, torch.OutOfMemoryError):  # an elastic layer appends a token or does not
            return self.call.kind == "update" and all(type(layer) is ElasticLayer for layer in forward.layers)
        return isinstance(error, Stale) and self.call.kind in ("mask", "attention")

    def settle(self, calls: Any) -> None:
        """Calls the function itself from now on, unless it still makes these calls of torch."""
        if self.call.calls is not None and not same(self.call.calls, calls):
            self.call.calls, self.act = None, self._whole

    def _update_act(self, program: Program, function: Any, args: Any, kwargs: Any) -> Act | None:
        """The usual update of a cache, in few calls."""
        if self.call.kind != "update" or len(args) < 4 or _varies(args[1:]) or _varies(kwargs):
            return None
        number, new, stream = self.call.number, args[1:], program.pool.handle
        keys, values, layer = args[1:4]

        def update(forward: Forward) -> None:
            own = forward.layers[layer]
            result = own.append_eagerly(keys, values, stream) if type(own) is ElasticLayer else None
            forward.fresh[number] = function(forward.cache, *new, **kwargs) if result is None else result

        return update

    def _attention_act(self, program: Program) -> Act | None:
        """Attention as torch's own calls."""
        if self.call.calls is None or len(self._targets) != 1:
            return None
        (target,) = self._targets.values()
        return as_one_function(self.call.calls, program.bound, functools.partial(self._copy, target), target)


def _varies(tree: Any) -> bool:
    """Does a tree with a program's tensors differ from forward to forward?"""
    return any(isinstance(leaf, (Fresh, Given)) or leaf is THE_CACHE for leaf in operands(tree))


def _maker(tree: Any) -> Callable[[Forward], Any]:
    """Returns the function that makes such a tree for a forward."""
    if not _varies(tree):
        return lambda forward: tree
    if isinstance(tree, Fresh):
        call, leaf = tree
        return lambda forward: forward.fresh[call][leaf]
    if isinstance(tree, Given):
        name, _, kind = tree.name.partition(".")
        return (lambda forward: forward.given[name][kind]) if kind else (lambda forward: forward.given[name])
    if isinstance(tree, dict):
        fixed = {name: part for name, part in tree.items() if not _varies(part)}
        named = [(name, _maker(part)) for name, part in tree.items() if name not in fixed]
        return lambda forward: fixed | {name: part(forward) for name, part in named}
    if isinstance(tree, (tuple, list)):
        kind_of, parts = type(tree), list(map(_maker, tree))
        return lambda forward: kind_of([part(forward) for part in parts])
    return lambda forward: forward.cache


class _LayerCall:
    """A decoder layer of a program: by graphs where it has them and is not away, else as one eager call."""

    def __init__(self, program: Program, layer: LayerStep, sequence: Acts | None) -> None:
        self.layer = layer
        self.whole = _EagerCall(program, layer.call)
        self.sequence = sequence

    def act(self, forward: Forward) -> None:
        sequence = self.sequence
        if sequence is None or self.layer.index in forward.away:
            assert self.whole.act is not None  # only calls of mask functions are left out
            self.whole.act(forward)
            return
        place, acting = 0, False
        try:
            for place, (replay, act) in enumerate(sequence):  # noqa: B007 (read where it raises)
                acting = False
                if replay is not None:
                    replay()
                if act is not None:
                    acting = True
                    act(forward)
        except Exception:
            forward.broken_at = place, acting
            raise


class Program:
    """A forward as graphs and eager calls, made of its recipe right after it was recorded."""

    def __init__(self, recipe: Recipe, recorder: ForwardRecorder, pool: GraphPool) -> None:
        """Captures on the current stream, which is the pool's. Raises what a capture raises; nothing is left then."""
        self.recipe = recipe
        self.pool = pool
        self.tensors: dict[Made, torch.Tensor] = {}  # that cross a cut
        self.layers: list[_LayerCall] = []
        self._held = _crossing(recipe)
        self._inputs: list[tuple[str, torch.Tensor]] = []
        with torch.inference_mode(False), torch.no_grad():
            for name, made in recipe.inputs.items():
                self.tensors[made] = copied = _like(Facts.of(recorder.given[name]), pool.device)
                self._inputs.append((name, copied))
            self.new_tokens = _new_tokens(recorder.given)
            self._calls: list[_EagerCall | _LayerCall | None] = []
            self._calls_of: dict[int, list[_EagerCall | _LayerCall | None]] = {}  # of the layers that have graphs
            self._sequence = self._build(recipe.steps, self._calls)
        self._trim()
        self._lacking = [
            layer.layer.index for layer in self.layers if layer.sequence is None
        ]  # and were not tried since
        self._never_alone = [layer.layer.index for layer in self.layers if layer.layer.why_not_alone]

    def run(self, forward: Forward) -> None:
        """Computes a forward. BrokenOff where it has to be computed on eagerly; also what eager calls raise."""
        place, acting = 0, False
        try:  # the same loop as a layer's: one function for both would be a call more per layer and token
            if any(layer in forward.away for layer in self._never_alone):
                raise Stale("a layer is away that cannot run on its own")
            for name, copied in self._inputs:
                copied.copy_(forward.given[name])
            for place, (replay, act) in enumerate(self._sequence):  # noqa: B007 (read where it raises)
                acting = False
                if replay is not None:
                    replay()
                if act is not None:
                    acting = True
                    act(forward)
        except Exception as error:
            if (done := self._done(forward, place, acting, error)) is None:
                raise
            raise BrokenOff(done) from error

    def _done(
        self, forward: Forward, place: int, acting: bool, error: BaseException
    ) -> list[tuple[EagerCall, Any]] | None:
        """Returns the eager calls of a forward that was broken off at this step, with what they returned; None where it
        cannot be computed on. `acting`: had the step's own call begun?"""
        made = [*self._calls[:place]]
        at = self._calls[place] if self._calls else None
        if acting and isinstance(at, _LayerCall) and forward.broken_at is not None:
            inner = self._calls_of[at.layer.index]
            place, acting = forward.broken_at
            made += inner[:place]
            at = inner[place]
        if acting and (at is None or isinstance(at, _LayerCall) or not at.may_be_made_again(forward, error)):
            return None
        calls: list[_EagerCall] = []
        for call in made:
            if isinstance(call, _LayerCall) and call.sequence is not None and call.layer.index not in forward.away:
                calls += [part for part in self._calls_of[call.layer.index] if isinstance(part, _EagerCall)]
            elif call is not None:
                calls.append(call.whole if isinstance(call, _LayerCall) else call)
        return [(call.call, call.result(forward)) for call in calls if not isinstance(call.call.function, OpOverload)]

    def output(self, forward: Forward) -> Any:
        """Returns what the forward that was computed last returns, as new tensors."""

        def leaf(value: Any) -> Any:
            if isinstance(value, Made):
                return self.tensors[value].clone()
            return forward.cache if value is THE_CACHE else value

        output = self.recipe.output
        if isinstance(output, OutputFields):
            return output.kind(**{name: rebuild(value, leaf) for name, value in output.fields.items()})
        return rebuild(output, leaf)

    def disagrees(self, recorder: ForwardRecorder, recipe: Recipe) -> str:
        """Computes the recorded forward, of this recipe, a second time, with what its eager calls have returned then,
        and returns where a bit differs; empty where none does. Touches no cache. Waits for the device."""
        names: list[str] = []
        differ: list[torch.Tensor] = []
        forward = Forward(recorder.cache, {}, ())
        made_then = {call.number: call.calls for call in eager_calls(recipe.steps)}

        def compare(name: str, mine: Iterable[tuple[Made, torch.Tensor]], theirs: Any) -> None:
            known = dict(theirs)
            for made, tensor in mine:
                if (other := known.get(made)) is not None:
                    names.append(name)
                    differ.append((_bits(tensor) != _bits(other)).any())

        def play(sequence: Acts, calls: Sequence[_EagerCall | _LayerCall | None], where: str) -> None:
            for place, ((replay, _), made) in enumerate(zip(sequence, calls, strict=True)):
                if replay is not None:
                    replay()
                if made is None:
                    continue
                call = made.whole if isinstance(made, _LayerCall) else made
                if call.call.number in made_then:
                    call.settle(made_then[call.call.number])
                    sequence[place] = replay, made.act
                compare(f"{where}{call.call}", call.cuts, recorder.cuts[call.call.number])
                if isinstance(made, _LayerCall) and made.sequence is not None and recorder.has_seen(made.layer):
                    play(made.sequence, self._calls_of[made.layer.index], f"{made.layer}, ")  # noqa: F821 (deleted afterwards)
                else:
                    call.put(forward, recorder.results[call.call.number])

        for name, copied in self._inputs:
            copied.copy_(recorder.given[name])
        try:
            play(self._sequence, self._calls, "")
        finally:
            del play  # it refers to itself: all that it has seen would live until garbage is collected
        made = [leaf for leaf in operands(self.recipe.output) if isinstance(leaf, Made)]
        compare("the output", [(leaf, self.tensors[leaf]) for leaf in made], recorder.cuts.get(OUTPUT, ()))
        return next((name for name, wrong in zip(names, _told(differ), strict=True) if wrong), "")

    def adopt(self, recipe: Recipe) -> None:
        """Captures layers that were away until now and that the recipe, of the forward that has just been recorded, has
        seen from within. Raises what a capture raises; those layers stay eager then."""
        with torch.inference_mode(False), torch.no_grad():
            for mine, layer in zip(self.layers, recipe.layers(), strict=True):
                if mine.sequence is not None or layer.body is None:
                    continue
                self._lacking.remove(layer.index)
                if self._reads_known(layer):
                    self._held |= _crossing(recipe)
                    mine.sequence = self._capture_layer(layer, late=True)
                    mine.layer = layer
        self._trim()

    def close(self) -> None:
        """Lets go of graphs and tensors, which refer to each other, so that their memory is free at once."""
        for calls in (self._calls, *self._calls_of.values()):
            for call in calls:
                if isinstance(call, _LayerCall):
                    vars(call.whole).clear()
                if call is not None:
                    vars(call).clear()
            calls.clear()
        self._sequence.clear()
        self.layers.clear()
        self.tensors = {}

    def worth_recording(self, away: Container[int]) -> bool:
        """Is there a layer without graphs that could get some, as it is not away any more?"""
        return bool(self._lacking) and any(layer not in away for layer in self._lacking)

    def _trim(self) -> None:
        """Lets go of tensors that were only needed to capture."""
        self.tensors = {made: tensor for made, tensor in self.tensors.items() if made in self._held}

    # -- operands

    def bound(self, tree: Any) -> Any:
        """Returns the tree with the program's tensors in it; what changes from forward to forward stays as it is."""
        return rebuild(tree, self._bound)

    def _bound(self, value: Any) -> Any:
        if isinstance(value, Made):
            return self.tensors[value]
        if isinstance(value, WeightOperand):
            return value.tensor()
        return value.tensor if isinstance(value, Number) else value

    # -- captures

    def _build(self, steps: Sequence[Step], calls: list[_EagerCall | _LayerCall | None]) -> Acts:
        """Captures what lies between the eager calls of the steps; adds those to `calls`, None for a graph at the
        end."""
        sequence: Acts = []
        ops: list[Op] = []
        for step in steps:
            if isinstance(step, Op):
                ops.append(step)
                continue
            replay = self._capture(ops)
            ops = []
            made: _EagerCall | _LayerCall
            if isinstance(step, LayerStep):
                body = None if step.body is None else self._capture_layer(step)
                self._own_results(step.call)
                made = _LayerCall(self, step, body)
                self.layers.append(made)
            else:
                self._own_results(step)
                made = _EagerCall(self, step)
            calls.append(made)
            sequence.append((replay, made.act))
        if ops:
            calls.append(None)
            sequence.append((self._capture(ops), None))
        return sequence

    def _capture_layer(self, layer: LayerStep, late: bool = False) -> Acts:
        """Captures the body of a layer. Its results are tensors of its body, or `late` are copied to those that others
        read already."""
        calls: list[_EagerCall | _LayerCall | None] = []
        sequence = self._build(layer.body or (), calls)
        if late:
            pairs = [(self.tensors[result], self.tensors[inner]) for result, inner in layer.made.items()]
            copies = [functools.partial(target.copy_, source) for target, source in pairs]
            sequence.append((self.pool.capture(copies), None))
            calls.append(None)
        else:
            self.tensors.update({result: self.tensors[inner] for result, inner in layer.made.items()})
        self._calls_of[layer.index] = calls
        return sequence

    def _own_results(self, call: EagerCall) -> None:
        for made, facts in call.facts.items():
            if made not in self.tensors:
                self.tensors[made] = _like(facts, self.pool.device)

    def _capture(self, ops: Sequence[Op]) -> Replay | None:
        if not ops:
            return None
        last = {leaf: index for index, op in enumerate(ops) for leaf in _of(op)}

        def work() -> Iterator[Callable[[], object]]:
            for index, op in enumerate(ops):
                yield functools.partial(self._do, op)
                for leaf in _of(op):
                    if last[leaf] == index and leaf not in self._held:
                        self.tensors.pop(leaf, None)

        if not any(_launches(op) for op in ops):  # views of what is there
            for act in work():
                act()
            return None
        return self.pool.capture(work())

    def _do(self, op: Op) -> None:
        args, kwargs = self.bound(op.args), self.bound(op.kwargs)
        tensors = [leaf for leaf in operands(op.function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for made, tensor, facts in zip(op.results, tensors, op.facts, strict=True):
            if Facts.of(tensor) != facts:
                raise RuntimeError(f"{op} made {Facts.of(tensor)} in a graph, and {facts} outside")
            self.tensors[made] = tensor

    def _reads_known(self, layer: LayerStep) -> bool:
        """Does its body read only tensors that the program has?"""
        read = {made for step in layer.body or () for made in read_by(step) if made.block == OUTSIDE}
        return read <= self.tensors.keys()


def _new_tokens(given: Mapping[str, Any]) -> int:
    """New tokens of each sequence."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    return 0 if tokens is None else int(tokens.shape[1])


def _told(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Returns the values of flags on the device, for which it waits once."""
    return torch.stack(list(flags)).tolist() if flags else []


def _like(facts: Facts, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as whole numbers, of which those that are equal have equal bits."""
    if tensor.dtype == torch.bool:
        return tensor
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(
        _BITS[8 if tensor.dtype == torch.complex128 else 4 if tensor.is_complex() else tensor.element_size()]
    )


def _of(op: Op) -> Iterator[Made]:
    """The tensors that an operator reads and makes."""
    for leaf in operands((op.args, op.kwargs)):
        if isinstance(leaf, Made):
            yield leaf
    yield from op.results


def _launches(op: Op) -> bool:
    """Does the operator launch a kernel, as far as is known?"""
    if op.function._schema.name.partition("::")[2] in _INITIAL:
        return False
    returns = op.function._schema.returns
    is_view = bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )
    return not is_view


def _crossing(recipe: Recipe) -> set[Made]:
    """The tensors that are used elsewhere than in the graph that makes them."""
    made_in: dict[Made, int] = {}
    crossing: set[Made] = {*recipe.inputs.values()}
    crossing.update(leaf for leaf in operands(recipe.output) if isinstance(leaf, Made))
    graph = 0

    def walk(steps: Sequence[Step]) -> None:
        nonlocal graph
        for step in steps:
            if isinstance(step, Op):
                crossing.update(leaf for leaf in read_by(step) if made_in.get(leaf) != graph)
                for result in step.results:
                    made_in.setdefault(result, graph)
                    if made_in[result] != graph:
                        crossing.add(result)
                continue
            graph += 1
            crossing.update(read_by(step))
            call = step.call if isinstance(step, LayerStep) else step
            if isinstance(step, LayerStep) and step.body is not None:
                walk(step.body)
                graph += 1
                crossing.update(step.made.values())
            crossing.update(call.facts)
            graph += 1

    walk(recipe.steps)
    return crossing
