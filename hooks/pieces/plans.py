"""What is known of the forwards of one key, from that what the next one does, and whether the model was set to
something else since.

Note [Steps of a key]
    The first forward of a key is recorded, and that is all. The second is recorded too: where both computed the same,
    at two lengths, it is captured, and computed again by its graphs, to the bit. The third, at another length again, is
    the proof: recorded, and computed again. From then on graphs are replayed. In each later call of `generate()` the
    first forward is recorded and compared anew, which finds adapters that were switched, attention that was set,
    weights that were replaced: each is a variant of the key, with graphs of its own, and one that comes back is known.

Note [Settings]
    Which operators a forward consists of depends on what its modules and configurations hold besides tensors: the
    active adapter, an epsilon, the name of an attention. Code of the user can change that between two tokens of one
    call, in a processor of logits, a stopping criterion, a streamer, or beside a loop of batches. So where such code
    may run settings are compared before each forward by graphs, flat collections of numbers and texts by value.
    transformers' own processors and streamers set nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import call, itemgetter
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig
from transformers.generation.streamers import TextStreamer

PROOFS: Final = 2  # comparisons, at two lengths, to the bit that a variant has passed before its graphs are replayed
VARIANTS: Final = 4  # of a key, that are kept: those of the last recorded forwards
CHANGES: Final = 3  # of what one call of `generate()` computes: beyond that its length is in it
_TORCHS: Final = frozenset(vars(nn.Module())) - {"training"}  # entries of every module, where tensors and hooks are
_VALUES: Final = (type(None), bool, int, float, complex, str, bytes)
_RUN_CODE: Final = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")


class Act(Enum):
    """What a forward does."""

    EAGER = "eager"  # nothing of it is looked at
    RECORD = "record"  # eager, and written down
    REPLAY = "replay"  # by graphs


@dataclass(slots=True, eq=False)
class Variant:
    """Forwards that compute the same. `program`: None until it is captured. `lengths`: at which it was compared with
    eager code, to the bit."""

    recipe: Any
    program: Any = None
    lengths: set[Any] = field(default_factory=set)

    @property
    def proofs(self) -> int:
        """Comparisons at different lengths: a second one of a length tells nothing of others."""
        return len(self.lengths)


@dataclass(slots=True, eq=False)
class KeyPlan:
    """The forwards of one key: the variants, that of the last recorded forward first."""

    variants: list[Variant] = field(default_factory=list)
    call: object = None  # the call of `generate()` that has recorded one last
    changes: int = 0  # how often what is computed has changed in that call

    def replays(self, call: object) -> bool:
        """Is the next forward of `call` one by graphs?"""
        if self.call is not call or not self.variants:
            return False
        first = self.variants[0]
        return first.program is not None and first.proofs >= PROOFS

    def next(self, call: object, left: int, wanted: bool) -> Act:
        """Returns what the next forward of `call` does. `left`: forwards that the call is likely to make, this one too.
        `wanted`: may graphs be captured now?"""
        if self.replays(call):
            return Act.REPLAY
        first = self.variants[0] if self.variants else None
        if first is not None and first.program is not None:
            return Act.RECORD if left > max(1, PROOFS - first.proofs) else Act.EAGER
        seen = first is not None and self.call is call
        return Act.RECORD if wanted and left > PROOFS + (not seen) else Act.EAGER

    def pop_surplus(self) -> list[Variant]:
        """Removes the variants beyond those that are kept, and returns them."""
        surplus, self.variants = self.variants[VARIANTS:], self.variants[:VARIANTS]
        return surplus

    def recorded(self, call: object, recipe: Any, difference: Callable[[Any, Any], str]) -> tuple[Variant, str]:
        """Notes a recorded forward of `call`. Returns its variant, and why this call computes something else again and
        again; empty where it does not."""
        before = self.variants[0] if self.variants and self.call is call else None
        if self.call is not call:
            self.call, self.changes = call, 0
        current = next((variant for variant in self.variants if not difference(variant.recipe, recipe)), None)
        if current is None:
            current = Variant(recipe)
        else:
            self.variants.remove(current)
        self.variants.insert(0, current)
        why = ""
        if before is not None and before is not current:
            self.changes += 1
            if self.changes >= CHANGES:
                why = difference(before.recipe, recipe)
            if before.program is None and before in self.variants:
                self.variants.remove(before)
        return current, why


def sets_between(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Says whether code of the user may run between two tokens of `generate(*args, **kwargs)`."""
    streamer = kwargs.get("streamer")
    if len(args) > 2 or (streamer is not None and type(streamer) is not TextStreamer):
        return True
    given = (kwargs.get(name) for name in _RUN_CODE)
    return any(
        not type(part).__module__.startswith("transformers.")
        for value in given
        if value is not None
        for part in (value if isinstance(value, list) else [value])
    )


class ModelSettings:
    """The settings of a model's modules and of their configurations at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[dict[str, Any]] = []
        self._take: list[Callable[[dict[str, Any]], Any]] = []  # takes those of one owner
        for owner in _owners(model):
            self._owners.append(owner)
            self._take.append(itemgetter(*(owner.keys() - _TORCHS)))
        self._sizes = [len(owner) for owner in self._owners]
        taken = map(call, self._take, self._owners)
        self._values = [tuple(map(_copied, part)) if type(part) is tuple else _copied(part) for part in taken]

    def differ(self) -> bool:
        """Says whether any of them is another one now. For each token: nothing is called from Python per module."""
        try:
            sizes, values = [*map(len, self._owners)], [*map(call, self._take, self._owners)]
            return sizes != self._sizes or values != self._values
        except (KeyError, RuntimeError, ValueError):  # one is gone, or arrays are compared, which are not the same
            return True


def _owners(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields the attributes of each module, and of each configuration that one holds."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        yield vars(module)
        configs |= {id(value): value for value in vars(module).values() if isinstance(value, PreTrainedConfig)}
    while configs:
        _, config = configs.popitem()
        yield vars(config)
        configs |= {id(value): value for value in vars(config).values() if isinstance(value, PreTrainedConfig)}


def _copied(value: Any) -> Any:
    """Returns a copy of a collection that holds values only, and anything else as it is."""
    kind = type(value)
    parts = value.values() if kind is dict else value if kind in (list, set) else (value,)
    return kind(value) if kind in (dict, list, set) and all(isinstance(part, _VALUES) for part in parts) else value
