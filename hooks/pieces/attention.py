"""What transformers' attention and mask functions do for one token, so that they need not be called for each.

Note [Known functions]
    `sdpa_attention_forward` looks at a dozen things before it makes two or three calls of torch, for each layer of each
    token. Which calls these are does not depend on the length: so they are noted while it is recorded, and a program
    makes them itself. `create_causal_mask` makes no mask for one token that hides nothing, whatever the length. Only of
    these two is that known; any other function is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .recipe import EagerCall, Fresh, Given, Made, operands, rebuild

_ATTENTION: Final = "transformers.integrations.sdpa_attention"  # the module of the function
_MASK: Final = "create_causal_mask"
_READ: Final = frozenset(("config", "inputs_embeds", "position_ids", "cache", "past_key_values"))  # by mask functions


class Local(NamedTuple):
    """What an earlier one of the calls has returned."""

    place: int


class TorchCall(NamedTuple):
    """A call of torch that makes a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TorchListener(TorchFunctionMode):
    """Notes the calls of torch within a `with` block. `calls`: None where they cannot be made by themselves."""

    def __init__(self, operand: Callable[[torch.Tensor], Any]) -> None:
        """`operand`: returns what a tensor is to the forward; None where that is not known."""
        super().__init__()
        self.calls: list[TorchCall] | None = []
        self._operand = operand
        self._made: dict[int, Local] = {}
        self._alive: list[torch.Tensor] = []  # as ids count

    @staticmethod
    def understands(function: Callable[..., Any]) -> bool:
        """Does this function do the same whatever the length?"""
        return getattr(function, "__module__", "") == _ATTENTION

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self.calls is not None and isinstance(result, torch.Tensor):
            if any(result is given for given in args):  # nothing was to be done, or it was done in place
                self.calls = self.calls if function in _IDENTITIES else None
                return result
            read = rebuild((tuple(args), dict(kwargs)), self._read)
            if any(
                leaf is None and given is not None
                for leaf, given in zip(operands(read), operands((args, kwargs)), strict=False)
            ):
                self.calls = None
                return result
            self._alive.append(result)
            self._made[id(result)] = Local(len(self.calls))
            self.calls.append(TorchCall(function, *read))
        elif result is None:
            self.calls = None
        return result

    def returned(self, result: Any) -> Sequence[TorchCall] | None:
        """Returns the calls of a function that has returned `result`, the last of which makes its tensor."""
        first = result[0] if isinstance(result, tuple) and result else None
        calls, self._alive = self.calls, []
        if calls is None or not isinstance(first, torch.Tensor) or self._made.get(id(first)) != Local(len(calls) - 1):
            return None
        return calls

    def _read(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        operand = self._made.get(id(value)) or self._operand(value)
        return None if isinstance(operand, Given) else operand  # is looked up by name, in each forward


_IDENTITIES: Final = frozenset((torch.Tensor.contiguous,))


def as_one_function(
    calls: Sequence[TorchCall], bound: Callable[[Any], Any], take: Callable[[Any], None], target: torch.Tensor
) -> Callable[[Any], None]:
    """Returns a function of a forward, whose `fresh` is what its eager calls have returned by number, that makes these
    calls and copies the result of the last one to `target`, or gives it to `take` where it has another shape. `bound`:
    returns the tensor that an operand always is, or the operand."""
    names: dict[str, Any] = {}

    def name(value: Any) -> str:
        names[f"c{len(names)}"] = value
        return f"c{len(names) - 1}"

    def expression(value: Any) -> str:
        value = value if isinstance(value, (Local, Fresh)) else bound(value)
        if isinstance(value, Local):
            return f"t{value.place}"
        if isinstance(value, Fresh):
            return f"fresh[{name(value.call)}][{value.leaf}]"
        if type(value) in (tuple, list) and any(isinstance(leaf, (Local, Fresh)) for leaf in operands(value)):
            return f"({', '.join(map(expression, value))},)"
        return name(value)

    lines = []
    for place, (function, args, kwargs) in enumerate(calls):
        given = [*map(expression, args), *(f"{key}={expression(value)}" for key, value in kwargs.items())]
        lines.append(f"    t{place} = {name(function)}({', '.join(given)})")
    last = f"t{len(calls) - 1}"
    copy = f"    {name(target.copy_)}({last}) if {last}.shape == {name(target.shape)} else {name(take)}({last})"
    code = "\n".join(["def attend(forward):", "    fresh = forward.fresh", *lines, copy])
    exec(compile(code, "<attention>", "exec"), names)
    made: Callable[[Any], None] = names["attend"]
    return made


def makes_no_mask(call: EagerCall) -> bool:
    """Does this call of a mask function, which has returned None, do so at any length?"""
    if call.kind != "mask" or call.results is not None or getattr(call.function, "__name__", "") != _MASK:
        return False
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
    if any(value is not None for name, value in given.items() if name not in _READ):
        return False
    positions = given.get("position_ids")
    return getattr(given["config"], "_attn_implementation", None) == "sdpa" and isinstance(positions, Made)
