"""Recorded requests: the arrival of each, and the lengths of its prompt and answer. Pure but for reading the file.

Formats, told apart by their first line
    CSV with TIMESTAMP, ContextTokens, GeneratedTokens        Azure's traces of LLM inference
    CSV with num_prefill_tokens, num_decode_tokens            lengths only, as Sarathi-Serve's
    CSV with conversation, turn, role, tokens...              turns of conversations, lengths only
    JSON lines with timestamp (ms), input_length, output_length, hash_ids (of 512 tokens each)    Mooncake's

Without times, requests arrive at random, `rate` a second on average.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

from ...allocator.errors import TraceError

BLOCK: Final = 512  # tokens of a prompt that one of the `blocks` stands for


@dataclass(frozen=True, slots=True)
class RecordedArrival:
    """A recorded request. `at`: seconds after the first one. `prompt`, `new`: tokens. `blocks`: of the prompt's
    beginning, where equal numbers mean equal tokens; the rest of the prompt is unique."""

    at: float
    prompt: int
    new: int
    blocks: tuple[int, ...] = ()


def read(path: Path, *, limit: int | None = None, rate: float = 1.0, scale: float = 1.0) -> list[RecordedArrival]:
    """Returns the first `limit` requests of a file. `rate`: a second, where it has no times. `scale`: how many times
    faster than recorded they arrive. TraceError where there is no such file, its format is unknown, or a line is no
    request."""
    try:
        return _read(path, limit, rate, scale)
    except OSError as error:
        raise TraceError(str(path), 0, f"the trace cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(str(path), 0, f"the trace is no text: {error}") from None


def _read(path: Path, limit: int | None, rate: float, scale: float) -> list[RecordedArrival]:
    with path.open(encoding="utf-8", newline="") as file:
        first = file.readline()
        file.seek(0)
        kind = next((kind for sign, kind in _KINDS.items() if sign in first), None)
        if kind is None:
            raise TraceError(str(path), 1, f"no trace of requests begins with {first[:80]!r}")
        draw = random.Random(0)
        arrivals: list[RecordedArrival] = []
        at = 0.0
        try:
            for arrival in islice(kind(file), limit):
                if arrival.at < 0:
                    at += draw.expovariate(rate)
                    arrival = replace(arrival, at=at)
                arrivals.append(arrival)
        except UnicodeDecodeError:
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(str(path), 0, f"request {len(arrivals) + 1} cannot be read: {error!r}") from error
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


def _azure(lines: Iterable[str]) -> Iterator[RecordedArrival]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
        yield RecordedArrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _lengths(lines: Iterable[str]) -> Iterator[RecordedArrival]:
    for row in csv.DictReader(lines):
        yield RecordedArrival(-1.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))


def _turns(lines: Iterable[str]) -> Iterator[RecordedArrival]:
    """Yields a request for each answer; its prompt is the conversation so far, with a unique block per 512 tokens."""
    said, conversation = 0, ""
    for row in csv.DictReader(lines):
        tokens = int(next(value for name, value in row.items() if name.startswith("tokens")))
        if row["conversation"] != conversation:
            said, conversation = 0, row["conversation"]
        if row["role"] == "gpt" and said:
            first = int(conversation) * 2**20
            yield RecordedArrival(-1.0, said, tokens, tuple(range(first, first + said // BLOCK)))
        said += tokens


def _mooncake(lines: Iterable[str]) -> Iterator[RecordedArrival]:
    for line in lines:
        row = json.loads(line)
        blocks = tuple(row["hash_ids"][: row["input_length"] // BLOCK])
        yield RecordedArrival(row["timestamp"] / 1e3, row["input_length"], row["output_length"], blocks)


_KINDS: Final[dict[str, Callable[[Iterable[str]], Iterator[RecordedArrival]]]] = {
    "ContextTokens": _azure,
    "num_prefill_tokens": _lengths,
    "conversation,turn": _turns,
    "hash_ids": _mooncake,
}
