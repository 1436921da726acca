"""Hooks of modules that change nothing in them, and what the compiler sees of these.

Note [Compiled forwards]
    Traced by torch.compile the hooks do nothing, so that the whole model can be one graph: addresses do not change, and
    the hooks do nothing that a trace could miss. So a compiled forward holds no lease and meets no chaos. Where only
    `forward` is compiled (`model.forward = torch.compile(model.forward)`) the hooks of the model are outside of the
    graph, and its lease is held.

Note [Copies of a managed model]
    `copy.deepcopy` and `torch.save` copy a module with its hooks. The copy has weights of its own in ordinary memory
    and is not managed, so the hooks that it gets do nothing. They are made of the standard library, because a file may
    be loaded where there is no ballonet.

Note [Streaming and torch.compile]
    The compiler's graph is broken at the hooks of streamed layers, and wherever one of their weights is read; with
    `fullgraph=True` it says why it cannot go on. What was compiled before a layer streamed reads its backing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

CALL: Final = nn.Module._call_impl.__code__  # the code of a module's call, which its hooks find on the stack
_REASON: Final = (
    "ballonet streams the weights of this layer through slots that it shares with others, which a compiled graph "
    "cannot follow: compile without fullgraph=True, or give a budget in which nothing streams"
)


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
def opaquely(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what the compiler cannot follow: it breaks its graph, or says why where it was told not to."""
    return function(*args, **kwargs)


def remove_all(handles: list[RemovableHandle]) -> None:
    """Takes hooks out of their modules, and their handles out of the list. After an interrupt call it again."""
    while handles:
        handles.pop().remove()


class CallKeywords(dict[str, Any]):
    """The keyword arguments of a module's call, which a hook before it has put in their place. Only the frame of the
    call refers to them: a weak reference tells whether that frame still exists, which frames themselves cannot."""


class Hook:
    """Calls `act` and changes nothing. See Note [Compiled forwards], Note [Copies of a managed model]."""

    def __init__(self, act: Callable[..., None], *arguments: object) -> None:
        self._act = act
        self._arguments = arguments

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._act(*self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything and returns None
