"""Recorded requests: the arrival of each, and the lengths of its prompt and answer, read from files as their authors
publish them.

Formats, told apart by the names in their beginning
    CSV: TIMESTAMP, ContextTokens, GeneratedTokens              Azure's, 2023 and 2024; stamps without a zone are UTC
    CSV: Timestamp (s), Request tokens, Response tokens         BurstGPT; requests without an answer failed there
    CSV: num_prefill_tokens, num_decode_tokens                  lengths only, as Sarathi-Serve's and vAttention's
    CSV: conversation, turn, role, tokens...                    lengths of the turns of ShareGPT's conversations
    JSON: a list of objects with conversations                  ShareGPT; a tokenizer counts
    JSON lines: timestamp (ms), input_length, hash_ids (512)    Mooncake's
    JSON lines: the same in s, of 16 tokens, with chat_id       Qwen-Bailian's
    JSON: input_lens, output_lens, start_times, ...             `vllm bench serve --save-result --save-detailed`

What a file says of itself is checked: as many blocks as its prompt has, totals that are sums, and so many requests in a
second as a recording may have. Without times, requests arrive at random, `rate` a second on average.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

from ...allocator.errors import TraceError

BLOCK: Final = 512  # tokens of a block of Mooncake's, and of those that are made of conversations
UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}  # of times, in seconds
_RATES: Final = 1 / 3600, 1000.0  # requests a second, between which a recording's are; chosen
_MICROSECONDS: Final = re.compile(r"(?<=\.\d{6})\d+")


@dataclass(frozen=True, slots=True)
class RecordedArrival:
    """A recorded request. `at`: seconds after the first one. `prompt`, `new`: tokens. `blocks`: of the prompt's
    beginning, of `block_tokens` each, where equal numbers mean equal tokens; the rest of the prompt is unique."""

    at: float
    prompt: int
    new: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a file does not say. `rate`: requests a second, where it has no times, None: what it says, or 1;
    `time_unit`: of its times, in seconds, None: as its authors have it; `block_tokens`: the same of its blocks;
    `count`: returns the tokens of a text."""

    rate: float | None = None
    time_unit: float | None = None
    block_tokens: int | None = None
    count: Callable[[str], int] | None = None


class _Undecided(ValueError):
    """A file does not say enough, or contradicts itself or what is said of it; the message says what to do."""


_Reader = Callable[[TextIO, TraceOptions], Iterator[RecordedArrival]]


def read(
    path: Path, options: TraceOptions = TraceOptions(), *, limit: int | None = None, scale: float = 1.0
) -> list[RecordedArrival]:
    """Returns the first `limit` requests of a file, in the order of their arrival. `scale`: how many times faster than
    recorded they arrive. TraceError where there is no such file, its format is unknown, or a line is no request."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            arrivals = _read(path, file, options, limit)
    except OSError as error:
        raise TraceError(str(path), 0, f"the trace cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(str(path), 0, f"the trace is no text: {error}") from None
    if not arrivals:
        raise TraceError(str(path), 0, "there are no requests")
    arrivals.sort(key=lambda it: it.at)
    start = arrivals[0].at
    return [replace(request, at=(request.at - start) / scale) for request in arrivals]


def lengthened(arrivals: Sequence[RecordedArrival], lengths: float) -> list[RecordedArrival]:
    """Returns the requests with `lengths` times as many tokens each, at least one; cuts blocks where the prompt
    ends."""
    made = []
    for arrival in arrivals:
        prompt, new = max(1, round(arrival.prompt * lengths)), max(1, round(arrival.new * lengths))
        made.append(replace(arrival, prompt=prompt, new=new))
    return made


def _read(path: Path, file: TextIO, options: TraceOptions, limit: int | None) -> list[RecordedArrival]:
    line = file.readline()
    file.seek(0)
    arrivals: list[RecordedArrival] = []
    try:
        kind, names = _kind_of(line, file)
        _refuse_unused(kind, names, options)
        arrivals.extend(islice(kind(file, options), limit))
        if kind in _CLOCKED and options.time_unit is None:
            _check_rate(arrivals)
    except UnicodeDecodeError:
        raise
    except _Undecided as error:
        raise TraceError(str(path), 0, str(error)) from None
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise TraceError(str(path), 0, f"request {len(arrivals) + 1} cannot be read: {error!r}") from error
    return arrivals


def _kind_of(line: str, file: TextIO) -> tuple[_Reader, set[str]]:
    """Returns what reads a file that begins with this line, and the names in its beginning. _Undecided."""
    begins = line.lstrip()[:1]
    if begins == "[":
        return _sharegpt, set()
    if begins == "{":
        names = {*_object(line, file)}
        file.seek(0)
        if {"input_lens", "output_lens"} <= names:
            return _vllm, names
        if {"timestamp", "input_length", "output_length"} <= names:
            return _bailian if "chat_id" in names else _mooncake, names
    else:
        names = {name.strip() for name in next(csv.reader([line]), [])}
        for known, kind in _TABLES:
            if known <= names:
                return kind, names
    raise _Undecided(f"no trace of requests begins with {line[:80]!r}: `load --help` has the formats")


def _object(line: str, file: TextIO) -> Mapping[str, Any]:
    """The first object of a file, which has it on one line or is one object."""
    try:
        made = json.loads(line)
    except json.JSONDecodeError:
        made = json.load(file)
    return made if isinstance(made, dict) else {}


def _refuse_unused(kind: _Reader, names: set[str], options: TraceOptions) -> None:
    """Refuses what is said of a file that has no such thing, or says it itself. _Undecided."""
    timed = kind in (*_CLOCKED, _azure) or "start_times" in names
    if options.time_unit is not None and kind not in _CLOCKED:
        dated = "stamps with dates" if kind is _azure else "start_times, in seconds"
        why = f"its times are {dated}" if timed else "it has no times (--rate says how many requests come a second)"
        raise _Undecided(f"{why}: leave --time-unit out")
    if options.rate is not None and timed:
        raise _Undecided("its requests have times: leave --rate out, and make them come faster with --scale")
    if options.block_tokens is not None and "hash_ids" not in names:
        raise _Undecided("its prompts have no blocks (hash_ids): leave --block-tokens out")


def _check_rate(arrivals: Sequence[RecordedArrival]) -> None:
    """Are there as many requests in a second as a recording may have? _Undecided."""
    times = [arrival.at for arrival in arrivals]
    if not (seconds := max(times, default=0.0) - min(times, default=0.0)):
        return
    if not _RATES[0] <= len(times) / seconds <= _RATES[1]:
        come = f"{len(times):,} requests would come in {seconds:,.6g} s"
        raise _Undecided(f"{come}: say what its times are with --time-unit s, ms or us")


def _azure(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    for row in _rows(file):
        stamp = datetime.fromisoformat(_MICROSECONDS.sub("", row["TIMESTAMP"]))
        stamp = stamp.replace(tzinfo=stamp.tzinfo or UTC)
        yield RecordedArrival(stamp.timestamp(), _whole(row["ContextTokens"]), _whole(row["GeneratedTokens"]))


def _burstgpt(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    for row in _rows(file):
        prompt, new = _whole(row["Request tokens"]), _whole(row["Response tokens"])
        if "Total tokens" in row and _whole(row["Total tokens"]) != prompt + new:
            raise ValueError(f"{row['Total tokens']} tokens in all are not {prompt} and {new}")
        if new:
            yield RecordedArrival(_seconds(row["Timestamp"], options, 1.0), prompt, new)


def _lengths(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    times = _drawn(options.rate)
    for row in _rows(file):
        yield RecordedArrival(next(times), _whole(row["num_prefill_tokens"]), _whole(row["num_decode_tokens"]))


def _turns(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    said = (
        (
            row["conversation"],
            row["role"],
            _whole(next(text for name, text in row.items() if name.startswith("tokens"))),
        )
        for row in _rows(file)
    )
    return _answers(said, options)


def _sharegpt(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    count = options.count
    if count is None:
        raise _Undecided("its requests are texts: give a model whose tokenizer counts them, --tokenizer MODEL")
    said = (
        (str(number), turn["from"], count(turn["value"]))
        for number, conversation in enumerate(json.load(file))
        for turn in conversation["conversations"]
    )
    return _answers(said, options)


def _answers(said: Iterator[tuple[str, str, int]], options: TraceOptions) -> Iterator[RecordedArrival]:
    """Yields a request for each answer of conversations, whose turns are given with their speakers and tokens; its
    prompt is the conversation so far, whose blocks are this conversation's alone."""
    times, before, current, number = _drawn(options.rate), 0, "", -1
    for conversation, speaker, tokens in said:
        if conversation != current or number < 0:
            before, current, number = 0, conversation, number + 1
        if speaker in _ANSWERING and before and tokens:
            first = number * 2**20
            yield RecordedArrival(next(times), before, tokens, tuple(range(first, first + before // BLOCK)))
        before += tokens


def _mooncake(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    return _hashed(file, options, UNITS["ms"], BLOCK)


def _bailian(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    return _hashed(file, options, UNITS["s"], 16)


def _hashed(file: TextIO, options: TraceOptions, unit: float, size: int) -> Iterator[RecordedArrival]:
    size = options.block_tokens or size
    for line in filter(str.strip, file):
        row = json.loads(line)
        prompt, new, blocks = _whole(row["input_length"]), _whole(row["output_length"]), row.get("hash_ids", ())
        if blocks and len(blocks) != math.ceil(prompt / size):
            fits = [2**n for n in range(14) if math.ceil(prompt / 2**n) == len(blocks)]
            may = f"; {' or '.join(map(str, fits))} would fit" if fits else ""
            raise _Undecided(
                f"{len(blocks)} blocks of {size} tokens are no prompt of {prompt}: say how many a block has with "
                f"--block-tokens{may}"
            )
        yield RecordedArrival(
            _seconds(row["timestamp"], options, unit), prompt, new, tuple(blocks[: prompt // size]), size
        )


def _vllm(file: TextIO, options: TraceOptions) -> Iterator[RecordedArrival]:
    made = json.load(file)
    prompts, answers = made["input_lens"], made["output_lens"]
    errors, starts = made.get("errors") or [""] * len(prompts), made.get("start_times")
    if not len(prompts) == len(answers) == len(errors) == len(starts or prompts):
        raise ValueError("its lists have other lengths than each other")
    if starts is None:
        rate = float(made.get("request_rate", 1)) if options.rate is None else options.rate
        starts = [0.0] * len(prompts) if rate == math.inf else [*islice(_drawn(rate), len(prompts))]
    for start, prompt, new, error in zip(starts, prompts, answers, errors, strict=True):
        if new and not error:
            yield RecordedArrival(float(start), _whole(prompt), _whole(new))


def _rows(file: TextIO) -> Iterator[dict[str, str]]:
    """The rows of a table, by the names of its columns."""
    for row in csv.DictReader(file):
        yield {name.strip(): text.strip() for name, text in row.items() if name is not None and text is not None}


def _whole(given: Any) -> int:
    """A number of tokens. ValueError."""
    number = float(given)
    if not number.is_integer() or number < 0:
        raise ValueError(f"{given!r} is no number of tokens")
    return int(number)


def _seconds(given: Any, options: TraceOptions, unit: float) -> float:
    return float(given) * (options.time_unit or unit)


def _drawn(rate: float | None) -> Iterator[float]:
    """Times of arrivals at random, so many a second on average; the same each time."""
    draw, at = random.Random(0), 0.0
    while True:
        at += draw.expovariate(rate or 1.0)
        yield at


_ANSWERING: Final = ("gpt", "assistant", "chatgpt", "bing", "bard", "claude")
_TABLES: Final = (
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    ({"Timestamp", "Request tokens", "Response tokens"}, _burstgpt),
    ({"num_prefill_tokens", "num_decode_tokens"}, _lengths),
    ({"conversation", "turn", "role"}, _turns),
)
_CLOCKED: Final = (_burstgpt, _mooncake, _bailian)  # whose times are numbers, of a unit
