"""The replicas that are simulated: the shape of their model, and what each has of memory and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....allocator.errors import ManageError
from ....allocator.units import format_size
from ....offload.policy.replicas.chunk_cost import ChunkCost
from ....offload.policy.replicas.link_order import part_bytes
from ..machine import MachineSizes


@dataclass(frozen=True, slots=True)
class Shape:
    """Bytes of a model: of the weights of each decoder layer and of the `rest`, of a token's KV in all layers, and of
    what a token hands from one stage to the next."""

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
    """`replicas` that are alike: bytes of a device, of a page and of the host for each; bytes per second of its link to
    the host, and of what it sends to others (`network`), in each direction. `batch`: new tokens of a batch or a
    microbatch at most; `block`: tokens of KV that a request takes at once. ManageError where the model does not fit."""

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
        return tuple(-(-each // self.page) for each in self.shape.layers)

    @property
    def pages(self) -> int:
        """Pages that a replica has for layers and KV."""
        return self.budget // self.page - -(-self.shape.rest // self.page)

    @property
    def tokens(self) -> int:
        """Tokens of KV that fit beside all layers."""
        return (self.pages - sum(self.layer_pages)) * self.page // self.shape.kv

    def part(self, cost: ChunkCost) -> int:
        """Bytes that are sent at once of KV and layers: a quarter of what a stage of two takes for a full batch."""
        return part_bytes(cost.seconds(0, self.batch) / 2, self.network, self.page)
