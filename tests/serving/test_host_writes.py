"""Prompts whose KV goes to the host: copied by the copy engine beside the computation, each byte once, and never read
before it is there (hooks/batching/pages.py)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.hooks.batching.cache import ElasticPagedCache
from ballonet.hooks.batching.pages import HostWrites

from ..models import build
from .batches import BLOCK, PAGE, answers, kv_to_the_host, looping, prompts, stock

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("nothing_is_left")]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
TOKEN = 2 * 4 * 64 * 4  # bytes of a token's KV in one layer


class Seen:
    """What was handed to the copy engine, and how much of a block on the host is left to kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = 0  # of one layer
        self.left = 0  # rows of one layer, at most
        write, extend = HostWrites.write, ElasticPagedCache.extend_read_and_write_indices

        def writing(it: HostWrites, caches: Any, new: Any, read: Any, blocks: Any, *args: Any) -> None:
            self.blocks += len(blocks)
            write(it, caches, new, read, blocks, *args)

        def extending(it: Any, request: str, past: int, new: int, reads: Any, writes: Any) -> None:
            extend(it, request, past, new, reads, writes)
            for (name, kind), rows in zip(it.cache_allocators.items(), writes, strict=True):
                if name == "full_attention":
                    blocks = Counter(row // kind.block_physical_stride for row in rows)
                    for block in kind.block_table[request]:
                        pieces = it.pages.pieces(block // kind.blocks_per_sector)
                        if len(it.pages.client.away(pieces)) == len(pieces):
                            self.left = max(self.left, blocks[block])

        monkeypatch.setattr(HostWrites, "write", writing)
        monkeypatch.setattr(ElasticPagedCache, "extend_read_and_write_indices", extending)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies land late."""
    for name, value in testing.environment(link="100MB/s").items():
        monkeypatch.setenv(name, value)


def host_first(pages: int) -> None:
    """A pool with room for a few requests, and a host for all."""
    ballonet.install(pages * PAGE, page_size=PAGE, host_budget=512 * PAGE, device="cpu")


@pytest.mark.parametrize(
    ("name", "attention", "pages", "sizes"),
    [
        ("llama", "sdpa", 120, {"num_hidden_layers": 12}),
        ("cohere2", "sdpa", 100, {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}),
        ("mixtral", "eager", 120, {"num_hidden_layers": 8}),
    ],
)
def test_blocks_are_copied_beside_the_computation(
    name: str, attention: str, pages: int, sizes: dict[str, Any], slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = build(name, **sizes, **HEADS), prompts(24, 60)
    model.set_attn_implementation(attention)
    expected = stock(model, asked, 8)
    host_first(pages)
    seen = Seen(monkeypatch)
    with ballonet.manage(model, interval=None, batches="full"):
        assert answers(model, asked, 8) == expected
        assert seen.blocks > 0
        assert 0 < seen.left < BLOCK, "a kernel writes a full block over the link"
        assert ballonet.stats().copied.kv_d2h >= seen.blocks * BLOCK * TOKEN
        assert devices.require().snapshot()["pages"]["kv"] == 0


def test_blocks_on_their_way_are_not_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts end before their copies do, and `generate()` begins with what they have left."""
    for name, value in testing.environment(link="1MB/s").items():  # a tenth of a second for a layer
        monkeypatch.setenv(name, value)

    model, prompt = build("llama", num_hidden_layers=2, **HEADS), list(range(3, 3 + 3 * BLOCK))
    longer = torch.tensor([[*prompt, 7]])
    expected = model.generate(longer, max_new_tokens=4, do_sample=False)
    host_first(400)
    seen = Seen(monkeypatch)
    with kv_to_the_host(), ballonet.manage(model, interval=None, prefix_cache=True) as managed:
        with looping(model, 1) as manager:
            manager.add_request(prompt)
            while manager.get_result(timeout=1) is None:
                pass
            assert torch.equal(model.generate(longer, max_new_tokens=4, do_sample=False), expected)
            assert managed.prefixes.counts.hits > 0
        del manager
        assert seen.blocks == 2 * 3
