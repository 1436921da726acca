"""The simulated replicas: the sizes of their model, and the memory and links of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ...allocator.errors import ManageError
from ...allocator.units import format_size
from ...offload.policy.replicas.pipeline import ChunkCost
from ..plan.machine import MachineSizes

# Part of a stage's time that an exchange of KV may delay an activation by. Chosen; the link has as much to send.
_EXCHANGE: Final = 1 / 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Bytes of a model. `layers`: weights of each decoder layer; `rest`: other weights; `kv`: of a token in all layers;
    `hidden`: hidden state of a token, sent between stages."""

    layers: tuple[int, ...]
    rest: int
    kv: int
    hidden: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Returns the shape of a configuration whose layers all keep keys and values of all tokens, in its own type.
        ManageError where they do not."""
        sizes, text = MachineSizes.of(config), config.get_text_config()
        itemsize = getattr(config.dtype, "itemsize", 4)
        heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
        if heads is None or getattr(text, "kv_lora_rank", None):
            raise ManageError("the layers of this model keep no keys and values per head: their KV is not known")
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            sizes.layers, sizes.rest, 2 * heads * head * itemsize * len(sizes.layers), text.hidden_size * itemsize
        )


@dataclass(frozen=True, slots=True)
class VirtualFleet:
    """Equal `replicas`. Bytes of each: `budget` of the device, `page`, `host_budget`; bytes per second in each
    direction: `link` to its host, `network` to other replicas. `batch`: new tokens of a batch or a microbatch at most;
    `block`: tokens of a block of KV. ManageError where the model does not fit."""

    shape: Shape
    replicas: int
    budget: int
    page: int
    host_budget: int
    link: float
    network: float
    batch: int = 2048
    block: int = 16

    def __post_init__(self) -> None:
        if self.tokens < self.block:
            weights = format_size(sum(self.shape.layers) + self.shape.rest)
            raise ManageError(
                f"weights of {weights} leave no KV of {self.block} tokens in {format_size(self.budget)}: give more"
            )

    @property
    def layer_pages(self) -> tuple[int, ...]:
        """Pages of each layer."""
        return tuple(-(-layer // self.page) for layer in self.shape.layers)

    @property
    def pages(self) -> int:
        """Pages of a replica for layers and KV."""
        return self.budget // self.page - -(-self.shape.rest // self.page)

    @property
    def tokens(self) -> int:
        """Tokens of KV that fit beside all layers."""
        return (self.pages - sum(self.layer_pages)) * self.page // self.shape.kv

    def part(self, cost: ChunkCost) -> int:
        """Returns the bytes of a piece of KV: sending it takes a part of a stage's time for a full batch."""
        return max(self.page, int(cost.seconds(0, self.batch) / 2 * _EXCHANGE * self.network))
