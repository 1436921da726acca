"""What a model's modules and configurations are set to, and whether they were set to something else since.

Note [Settings]
    Which operators a forward consists of depends on what its modules and configurations hold besides tensors: the
    active adapter, an epsilon, the name of an attention. Code of the user can change that between two tokens of one
    call, in a processor of logits, a stopping criterion, a streamer, or beside a loop of batches. So where such code
    may run settings are compared before each forward by graphs: values of numbers, texts and flat collections of them,
    the identity of all else. transformers' own processors and streamers set nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._objects: list[tuple[dict[str, Any], str, Any]] = []
        for owner in _owners(model):
            self._sizes.append((owner, len(owner)))
            for name, value in owner.items():
                if name in _TORCHS:
                    continue
                if isinstance(value, _VALUES):
                    self._values.append((owner, name, value))
                elif (copied := _copied(value)) is not None:
                    self._values.append((owner, name, copied))
                else:
                    self._objects.append((owner, name, value))

    def differ(self) -> bool:
        """Says whether any of them is another one now."""
        return (
            any(len(owner) != size for owner, size in self._sizes)
            or any(owner.get(name, self) != value for owner, name, value in self._values)
            or any(owner.get(name) is not value for owner, name, value in self._objects)
        )


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
    """Returns a copy of a collection that holds values only; None for anything else."""
    if type(value) is dict:
        return dict(value) if all(isinstance(part, _VALUES) for part in value.values()) else None
    if type(value) in (list, tuple, set):
        return type(value)(value) if all(isinstance(part, _VALUES) for part in value) else None
    return None
