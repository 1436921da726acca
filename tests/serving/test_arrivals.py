"""Recorded requests are read as they are, and a load says of its answers what they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ballonet.__main__ import main
from ballonet.allocator.errors import TraceError
from ballonet.hooks.server.load import Answered, RecordedArrival, prompt_of, quantile, read, replay, summary

FILES = {
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,34,8",
        [RecordedArrival(0.0, 4808, 10), RecordedArrival(2.0, 34, 8)],
    ),
    "mooncake": (
        '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 0, "input_length": 20, "output_length": 6, "hash_ids": [7]}',
        [RecordedArrival(0.0, 20, 6), RecordedArrival(0.5, 1100, 5, (7, 8))],
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_recorded_arrivals_are_read(kind: str, tmp_path: Path) -> None:
    text, expected = FILES[kind]
    (tmp_path / "trace").write_text(text)
    assert read(tmp_path / "trace") == expected
    fast = read(tmp_path / "trace", scale=4.0, limit=2)
    assert [arrival.at for arrival in fast] == [arrival.at / 4 for arrival in expected]


def test_a_conversation_is_a_request_for_each_answer(tmp_path: Path) -> None:
    rows = "0,0,human,9,500\n0,1,gpt,9,100\n0,2,human,9,20\n0,3,gpt,9,30\n1,0,human,9,3\n1,1,gpt,9,4"
    (tmp_path / "turns").write_text(f"conversation,turn,role,chars,tokens_x\n{rows}")
    arrivals = read(tmp_path / "turns", rate=2.0)
    assert [(turn.prompt, turn.new, turn.blocks) for turn in arrivals] == [(500, 100, ()), (620, 30, (0,)), (3, 4, ())]
    assert arrivals[0].at == 0.0
    assert arrivals == read(tmp_path / "turns", rate=2.0), "the same at each time"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "num_prefill_tokens,num_decode_tokens\n", "hash_ids\n{}"])
def test_file_that_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError):
        read(tmp_path / "trace")


def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"hash_ids \xff\xfe")
    for name, why in (("missing", "No such file"), (".", "Is a directory"), ("bytes", "no text")):
        with pytest.raises(TraceError, match=why):
            read(tmp_path / name)
        for command in (["load"], ["whatif", "--budget", "16MiB"]):
            assert main([*command, str(tmp_path / name), "--model", "any"]) == 2
            assert why in capsys.readouterr().err


def test_prompts_share_what_their_blocks_share() -> None:
    one, other = RecordedArrival(0.0, 1100, 5, (7, 8)), RecordedArrival(0.0, 1200, 5, (7, 9))
    first, second = (prompt_of(arrival, n, 0.1).split() for n, arrival in enumerate((one, other)))
    assert (len(first), len(second)) == (110, 120)
    assert first[:51] == second[:51]
    assert first[51:102] != second[51:102]


def test_the_figures_of_a_load() -> None:
    good = [Answered(0.0, 1.3, [1.0, 1.1, 1.3], 3), Answered(1.0, 2.0, [1.5, 2.0], 2), Answered(0.0, 0.5, [], 0)]
    figures = summary([*good, Answered(0.0, error="refused")], ttft_slo=0.6, tpot_slo=None)
    assert (figures["requests"], figures["failed"], figures["tokens"], figures["seconds"]) == (4, 1, 5, 2.0)
    assert (figures["ttft_p50"], figures["ttft_p99"]) == (0.5, 1.0)
    assert figures["tbt_p99"] == pytest.approx(0.5)
    assert (figures["tokens_per_second"], figures["goodput"]) == (2.5, 1.0)
    assert summary(good, 0.6, 0.2)["goodput"] == 0.5
    assert summary([Answered(0.0, error="refused")], None, None)["ttft_p50"] is None


@pytest.mark.parametrize(
    ("values", "part", "found"),
    [
        *(([2, 1], 0.5, 1), ([3, 1, 2], 0.5, 2), ([4], 0.01, 4), ([], 0.5, None)),
        *((range(1, 101), part, round(100 * part)) for part in (0.01, 0.07, 0.99, 1.0)),
        (range(1, 102), 0.99, 100),
    ],
)
def test_a_quantile_is_the_nearest_rank(values: Sequence[float], part: float, found: float | None) -> None:
    assert quantile(values, part) == found


@pytest.mark.parametrize("finish", ["length", None])
def test_an_answer_that_is_cut_off_has_failed(finish: str | None) -> None:
    async def create(**_: object) -> AsyncIterator[Any]:
        async def pieces() -> AsyncIterator[Any]:
            for text, reason in (("a", None), ("b", finish)):
                yield SimpleNamespace(usage=None, choices=[SimpleNamespace(text=text, finish_reason=reason)])

        return pieces()

    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    (answer,) = asyncio.run(replay([RecordedArrival(0.0, 3, 2)], client, "model", 1.0, lambda _: None))
    assert answer.tokens == 2
    assert bool(answer.error) == (finish is None)
