"""Recorded requests are read as they are, and a load says of its answers what they were."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ballonet.__main__ import main
from ballonet.allocator.errors import TraceError
from ballonet.hooks.server.arrivals import RecordedArrival, TraceOptions, read
from ballonet.hooks.server.load import Answered, prompt_of, quantile, replay, summary

FILES = {
    "azure 2023": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,34,8",
        [RecordedArrival(0.0, 4808, 10), RecordedArrival(2.0, 34, 8)],
    ),
    "azure 2024, a stamp of whole seconds": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.5+00:00,2162,5\n2024-05-10 00:00:02+00:00,2399,6\n2024-05-10T02:00:04.5+02:00,7,1",
        [RecordedArrival(0.0, 2162, 5), RecordedArrival(1.5, 2399, 6), RecordedArrival(4.0, 7, 1)],
    ),
    "azure, zones and none": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 01:00:01Z,1,2\n2024-05-10 01:00:00,3,4",
        [RecordedArrival(0.0, 3, 4), RecordedArrival(1.0, 1, 2)],
    ),
    "burstgpt, with one that failed": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n7.5,GPT-4,9,0,9,API log\n45,ChatGPT,1087,230,1317,Conversation log",
        [RecordedArrival(0.0, 472, 18), RecordedArrival(40.0, 1087, 230)],
    ),
    "mooncake": (
        '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 0, "input_length": 20, "output_length": 6, "hash_ids": [7]}',
        [RecordedArrival(0.0, 20, 6), RecordedArrival(0.5, 1100, 5, (7, 8))],
    ),
    "bailian": (
        '{"chat_id": 0, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 9, "type": "text",'
        ' "turn": 1, "hash_ids": [0, 1, 2]}\n'
        '{"chat_id": 1, "parent_chat_id": 0, "timestamp": 4.0, "input_length": 48, "output_length": 3, "type": "text",'
        ' "turn": 2, "hash_ids": [0, 1, 3]}',
        [RecordedArrival(0.0, 40, 9, (0, 1), 16), RecordedArrival(2.5, 48, 3, (0, 1, 3), 16)],
    ),
    "vllm's detailed results": (
        '{"date": "20260101", "request_rate": 4.0, "input_lens": [10, 20, 30], "output_lens": [3, 0, 5],'
        ' "start_times": [100.5, 100.75, 102.5], "errors": ["", "timed out", ""]}',
        [RecordedArrival(0.0, 10, 3), RecordedArrival(2.0, 30, 5)],
    ),
    "vllm's, all at once": (
        '{"request_rate": "inf", "input_lens": [10, 20], "output_lens": [3, 4]}',
        [RecordedArrival(0.0, 10, 3), RecordedArrival(0.0, 20, 4)],
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_recorded_arrivals_are_read(kind: str, tmp_path: Path) -> None:
    text, expected = FILES[kind]
    (tmp_path / "trace").write_text(text)
    assert read(tmp_path / "trace") == expected
    fast = read(tmp_path / "trace", scale=4.0, limit=2)
    assert [arrival.at for arrival in fast] == [arrival.at / 4 for arrival in expected[:2]]


def test_lengths_may_be_floats(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n7564.0,192.0,39.4\n3,4,0.75")
    assert [(arrival.prompt, arrival.new) for arrival in read(tmp_path / "trace")] == [(7564, 192), (3, 4)]


def test_texts_are_counted_by_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As ShareGPT has them: a request for each answer, its prompt is what was said before."""
    said = [("human", "a b c"), ("gpt", "d e"), ("human", "f"), ("gpt", "g h i j"), ("gpt", "k")]
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    (tmp_path / "trace").write_text(json.dumps([{"id": "x", "conversations": turns}, {"id": "y", "conversations": []}]))
    arrivals = read(tmp_path / "trace", TraceOptions(count=lambda text: len(text.split())))
    assert [(arrival.prompt, arrival.new) for arrival in arrivals] == [(3, 2), (6, 4), (10, 1)]
    assert main(["load", str(tmp_path / "trace"), "--model", "any"]) == 2
    assert "--tokenizer MODEL" in capsys.readouterr().err


def lines(count: int, step: float, **more: Any) -> str:
    """Requests of 100 tokens as Mooncake's, so many apart."""
    rows = ({"timestamp": step * n, "input_length": 100, "output_length": 5, **more} for n in range(count))
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (lines(1, 1, hash_ids=[1, 2]), TraceOptions(), "--block-tokens; 64 would fit"),
        (lines(1, 1, hash_ids=[1]), TraceOptions(block_tokens=16), "--block-tokens; 128 or 256 or 512"),
        (lines(20, 0.01), TraceOptions(), "20 requests would come in 0.00019 s: .*--time-unit"),
        (lines(20, 1e10), TraceOptions(), "--time-unit"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(text: str, options: TraceOptions, why: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match=why):
        read(tmp_path / "trace", options)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("azure 2023", TraceOptions(time_unit=1e-3), "stamps with dates: leave --time-unit out"),
        ("vllm's detailed results", TraceOptions(time_unit=1e-3), "start_times, in seconds: leave --time-unit out"),
        ("vllm's, all at once", TraceOptions(time_unit=1.0), "no times .--rate .*: leave --time-unit out"),
        ("vllm's detailed results", TraceOptions(rate=2.0), "leave --rate out, .* --scale"),
        ("bailian", TraceOptions(rate=2.0), "leave --rate out, .* --scale"),
        (
            "azure 2024, a stamp of whole seconds",
            TraceOptions(block_tokens=16),
            "no blocks .*: leave --block-tokens out",
        ),
        ("burstgpt, with one that failed", TraceOptions(block_tokens=16), "leave --block-tokens out"),
        ("vllm's, all at once", TraceOptions(block_tokens=512), "leave --block-tokens out"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(
    kind: str, options: TraceOptions, why: str, tmp_path: Path
) -> None:
    (tmp_path / "trace").write_text(FILES[kind][0])
    with pytest.raises(TraceError, match=why):
        read(tmp_path / "trace", options)
    (tmp_path / "trace").write_text(lines(3, 1000))
    with pytest.raises(TraceError, match="--block-tokens out"):
        read(tmp_path / "trace", TraceOptions(block_tokens=16))


def test_units_of_times_and_sizes_of_blocks_are_as_somebody_says(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(lines(20, 0.01, hash_ids=[1, 2]))
    arrivals = read(tmp_path / "trace", TraceOptions(time_unit=1.0, block_tokens=64))
    assert arrivals[-1] == RecordedArrival(pytest.approx(0.19), 100, 5, (1,), 64)


def test_a_conversation_is_a_request_for_each_answer(tmp_path: Path) -> None:
    rows = "0,0,human,9,500\n0,1,gpt,9,100\n0,2,human,9,20\n0,3,gpt,9,30\n1,0,human,9,3\n1,1,gpt,9,4"
    (tmp_path / "turns").write_text(f"conversation,turn,role,chars,tokens_x\n{rows}")
    arrivals = read(tmp_path / "turns", TraceOptions(2.0))
    assert [(turn.prompt, turn.new, turn.blocks) for turn in arrivals] == [(500, 100, ()), (620, 30, (0,)), (3, 4, ())]
    assert arrivals[0].at == 0.0
    assert arrivals == read(tmp_path / "turns", TraceOptions(2.0)), "the same at each time"


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "[1]", "{}", "{", "num_prefill_tokens,num_decode_tokens\n", "hash_ids\n{}"]
)
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
    assert (figures["ttft_p50"], figures["ttft_p99"]) == (0.5, None), "a refused request is answered never"
    assert (figures["tbt_p50"], figures["tbt_p99"]) == (pytest.approx(0.2), None)
    assert (summary(good, None, None)["ttft_p99"], summary(good, None, None)["tbt_p99"]) == (1.0, pytest.approx(0.5))
    assert (figures["tokens_per_second"], figures["goodput"]) == (2.5, 1.0)
    late = [Answered(0.0, 1.3, [0.5, 0.6, 0.7, 0.8, 1.3], 5)]  # 0.2 s a token, and one gap of 0.5 s
    assert summary([*good, *late], 0.6, 0.2)["goodput"] == summary(good, 0.6, 0.2)["goodput"] == 0.5
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
