"""Attention of batches by request in half precision: torch's kernel for packed sequences, each request as if it were
alone, however its keys lie in the cache."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import ballonet
from ballonet import testing
from ballonet.hooks.batching import attention

from ..models import build
from ..serving.batches import answers, kv_to_the_host, prompts
from .scene import Place, scene

KERNEL = torch.ops.aten._flash_attention_forward.default
DIM = 16


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """The same kernel for one request whose rows and keys, [tokens, heads, dim], lie apart from all others."""
    starts = [torch.tensor([0, len(states)], dtype=torch.int32, device=query.device) for states in (query, key)]
    sees = {"window_size_left": window - 1} if window else {}
    states = (part.contiguous() for part in (query, key, value))
    attended: torch.Tensor = KERNEL(*states, *starts, len(query), len(key), 0.0, True, False, scale=scale, **sees)[0]
    return attended


class Watched:
    """The calls of the kernel by a loop, each compared with its requests alone."""

    def __init__(self) -> None:
        self.ways: set[str] = set()
        self.requests = 0
        self._lengths: list[int] = []  # tokens of each request of the step, those it computes included

    def __enter__(self) -> Watched:
        self._stock, self._step = attention.attend_packed, ContinuousBatchProcessor._generation_step

        def step(processor: Any, model: Any) -> None:
            requests = processor.inputs_and_outputs.requests_in_batch
            self._lengths = [request.state.position_offset for request in requests]
            self._step(processor, model)

        attention.attend_packed, ContinuousBatchProcessor._generation_step = self, step
        return self

    def __exit__(self, *_: object) -> None:
        attention.attend_packed, ContinuousBatchProcessor._generation_step = self._stock, self._step

    def __call__(
        self,
        query: torch.Tensor,
        states: Any,
        starts: tuple[torch.Tensor, torch.Tensor],
        most: tuple[int, int],
        window: int,
        scale: float,
        dropout: float,
        used: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self._stock(query, states, starts, most, window, scale, dropout, used, table)
        first, begin = (bounds.tolist() for bounds in starts)
        self.ways.add("together" if used is None else "in place" if table is None else "by blocks")
        self.requests = max(self.requests, len(first) - 1)
        for n, row in enumerate(first[:-1]):
            count = begin[n + 1] - begin[n] if used is None else int(used[n])
            assert count == self._lengths[n] or window
            if table is None:
                own = [part[begin[n] : begin[n] + count] for part in states]
            else:
                tokens = states[0].shape[1]
                blocks = table[n, : -(-count // tokens)].long()
                own = [part[blocks].flatten(0, 1)[:count] for part in states]
            rows = query[0].transpose(0, 1)[row : first[n + 1]]
            torch.testing.assert_close(attended[0, row : first[n + 1]], alone(rows, *own, window, scale))
        return attended


def half(place: Place, name: str = "llama", **changes: Any) -> Any:
    if not place.cuda:
        pytest.skip("the kernel is CUDA's")
    return build(name, **{"head_dim": DIM, **changes}).to(place.kind, torch.bfloat16)


# keys in several blocks are copied together, or read by tables of blocks where torch takes them; in one block they lie
@pytest.mark.parametrize(("block", "longest"), [(16, 60), (256, 60), (256, 300)])
@scene(pages=512)
def test_each_request_of_a_batch_attends_as_if_it_were_alone(place: Place, block: int, longest: int) -> None:
    model, asked = half(place), prompts(8, 60)
    asked[0] = [*(asked[0] * longest)[:longest]]
    expected = answers(model, asked, 12, page_size=block, num_blocks=256)
    gc.collect()
    with ballonet.manage(model), Watched() as watched:
        actual = answers(model, asked, 12, page_size=block, max_batch_tokens=256)
    assert [reply.error for reply in actual] == [None] * len(asked)
    assert watched.requests == 8
    in_blocks = "by blocks" if attention.takes_tables() and block == 256 else "together"
    way = "in place" if longest < block else in_blocks
    assert {way} <= watched.ways <= {way, "together", "in place"}, "prompts alone read what they bring"
    first = sum(one.tokens[0] == other.tokens[0] for one, other in zip(actual, expected, strict=True))
    assert first >= 6, "the others round otherwise"


@scene(pages=512)
def test_layers_with_a_window_attend_to_it_alone(place: Place) -> None:
    model, asked = half(place, "gemma3_text"), prompts(8, 60)
    with ballonet.manage(model), Watched() as watched:
        assert [reply.error for reply in answers(model, asked, 12, page_size=16)] == [None] * 8
    assert watched.requests == 8


@scene(pages=512)
def test_requests_attend_as_if_alone_while_pages_move(place: Place) -> None:
    model, asked = half(place), prompts(8, 60)
    with testing.manage(model, chaos=3), Watched() as watched:
        assert [reply.error for reply in answers(model, asked, 12, page_size=256)] == [None] * 8
    assert "in place" in watched.ways


@scene(pages=1024, host_pages=1024, needs_host=True)
def test_keys_on_their_way_to_the_host_are_not_read_in_place(place: Place) -> None:
    large = {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    model, asked = half(place, **large), prompts(8, 60)
    before = ballonet.stats().copied.kv_d2h
    with kv_to_the_host(), ballonet.manage(model, interval=None), Watched() as watched:
        assert [reply.error for reply in answers(model, asked, 12, page_size=16)] == [None] * 8
    assert ballonet.stats().copied.kv_d2h > before
    assert watched.requests == 8


@pytest.mark.parametrize("settings", [{"use_cuda_graph": True}, {}])
@scene(pages=512)
def test_heads_and_steps_that_the_kernel_cannot_take_stay_stocks(place: Place, settings: dict[str, bool]) -> None:
    model = half(place, head_dim=DIM if settings else 12)
    with ballonet.manage(model), Watched() as watched:
        assert [reply.error for reply in answers(model, prompts(4, 30), 8, **settings)] == [None] * 4
    assert not watched.ways


@scene(pages=64)
def test_the_kernel_reads_the_keys_that_it_is_told_of(place: Place) -> None:
    """Sequences with gaps between them, lengths of their own, a window; and what lies beyond makes no difference."""
    if not place.cuda:
        pytest.skip("the kernel is CUDA's")
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(64, 2, DIM, generator=generator).to(place.kind, torch.bfloat16) for _ in range(2)]
    query = torch.randn(9, 4, DIM, generator=generator).to(place.kind, torch.bfloat16)
    make = {"dtype": torch.int32, "device": place.kind}
    rows, firsts = torch.tensor([0, 1, 6, 9], **make), torch.tensor([40, 3, 20, 0], **make)
    used = torch.tensor([20, 5, 11], **make)
    for window in (0, 4):
        batch = query.transpose(0, 1)[None]
        attended = attention.attend_packed(batch, tuple(states), (rows, firsts), (5, 20), window, 0.3, 0.0, used)
        for n, first in enumerate(firsts.tolist()[:3]):
            own = query[int(rows[n]) : int(rows[n + 1])]
            keys = [part[first : first + int(used[n])] for part in states]
            q, k, v = (part.float().cpu().transpose(0, 1)[None] for part in (own, *keys))
            position = torch.arange(len(own))[:, None] + int(used[n]) - len(own) - torch.arange(int(used[n]))
            mask = (position >= 0) & (position < (window or 64))
            expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
            expected = expected[0].transpose(0, 1)
            actual = attended[0, int(rows[n]) : int(rows[n + 1])].float().cpu()
            torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
