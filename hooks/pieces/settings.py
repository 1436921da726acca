"""What a model's modules and configurations are set to, and whether they were set to something else since.

Note [Settings]
    Which operators a forward consists of depends on what its modules and configurations hold besides tensors: the
    active adapter, an epsilon, the name of an attention. Code of the user can change that between two tokens of one
    call, in a processor of logits, a stopping criterion, a streamer, or beside a loop of batches. So where such code
    may run settings are compared before each forward by graphs, flat collections of numbers and texts by value.
    transformers' own processors and streamers set nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import call, itemgetter
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig
from transformers.generation.streamers import TextStreamer

_TORCHS: Final = frozenset(vars(nn.Module())) - {"training"}  # entries of every module, where tensors and hooks are
_VALUES: Final = (type(None), bool, int, float, complex, str, bytes)
_RUN_CODE: Final = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")


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
