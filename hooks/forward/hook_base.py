"""What the hooks of modules have in common: they change nothing, the compiler sees nothing of most of them, and they
act only on layers that this process runs.

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

Note [Layers of other processes]
    A forward over a span (hooks/splice) calls every layer up to its end, but layers outside of the span only pass their
    input through. Their hooks are called as ever. So code that acts on a layer because it is about to run checks
    `LocalLayers` first: the hook before a layer (forwards.py), and the ring of slots, whose order leaves out such a
    layer (offload/residency/ring.py). The span changes between forwards only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...offload.policy.replicas.groups import Span

CALL: Final = nn.Module._call_impl.__code__  # the code of a module's call, which its hooks find on the stack
_REASON: Final = (
    "ballonet streams the weights of this layer through slots that it shares with others, which a compiled graph "
    "cannot follow: compile without fullgraph=True, or give a budget in which nothing streams"
)
_known: Final[weakref.WeakKeyDictionary[nn.Module, LocalLayers]] = weakref.WeakKeyDictionary()


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


class LocalLayers:
    """Which layers of one model this process runs: those of `span`; None: all."""

    def __init__(self) -> None:
        self.span: Span | None = None
        self.spliced_by: Callable[[], Any] = lambda: None  # returns the Splice that sets it, None where there is none

    def runs(self, layer: int) -> bool:
        """Does this process run the decoder layer of this number?"""
        span = self.span
        return span is None or layer in span


def local_layers_of(model: nn.Module) -> LocalLayers:
    """The `LocalLayers` of this model, always the same object."""
    return _known.setdefault(model, LocalLayers())
