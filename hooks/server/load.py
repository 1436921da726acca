"""Recorded requests, the arrival of each and the lengths of its prompt and answer, and their replay against a server,
with OpenAI's client, whose latencies are summarized.

Formats, told apart by their first line
    CSV with TIMESTAMP, ContextTokens, GeneratedTokens        Azure's traces of LLM inference
    CSV with num_prefill_tokens, num_decode_tokens            lengths only, as Sarathi-Serve's
    CSV with conversation, turn, role, tokens...              turns of conversations, lengths only
    JSON lines with timestamp (ms), input_length, output_length, hash_ids (of 512 tokens each)    Mooncake's

Without times, requests arrive at random, `rate` a second on average.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import TraceError

BLOCK: Final = 512  # tokens of a prompt that one of the `blocks` stands for
# headers of a request: its SLOs to the first token, and of a decode step, as "80ms"
SLOS: Final = ("x-ttft-slo", "x-tpot-slo")
# words that most tokenizers have as one token each
WORDS: Final = """
    the of and to in is it that he was for on are as with his they at be this from have or by one had not but what all
    were when we there can an your which their said if do will each about how up out them then she many some so
""".split()  # noqa: SIM905 (fifty lines otherwise)


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


@dataclass
class Answered:
    """The answer to one request, in seconds since the first one was due. `times`: of each received piece. `refused`:
    was its HTTP status 4xx?"""

    sent: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    refused: bool = False

    @property
    def ttft(self) -> float:
        """Seconds to the first piece, or to the end where there was none."""
        return (self.times[0] if self.times else self.ended) - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces."""
        return [later - sooner for sooner, later in pairwise(self.times)]


def headers(*slos: float | None) -> dict[str, str]:
    """Returns the headers for these SLOs, in seconds; None: no SLO."""
    return {name: f"{slo * 1e6:.0f}us" for name, slo in zip(SLOS, slos, strict=True) if slo is not None}


def prompt_of(arrival: RecordedArrival, number: int, lengths: float) -> str:
    """Makes a prompt of words; equal blocks get equal words. `lengths`: how many times as many tokens as recorded."""
    words: list[str] = []
    wanted = max(1, round(arrival.prompt * lengths))
    for block in (*arrival.blocks, f"request {number}"):
        draw = random.Random(str(block))
        words += draw.choices(WORDS, k=min(wanted - len(words), max(1, round(BLOCK * lengths))))
    draw = random.Random(f"rest of {number}")
    return " ".join(words + draw.choices(WORDS, k=max(0, wanted - len(words))))


async def replay(
    arrivals: Sequence[RecordedArrival], client: Any, model: str, lengths: float, note: Callable[[int], None]
) -> list[Answered]:
    """Sends each request when it is due, whether earlier ones are answered or not. `client`: an openai.AsyncOpenAI.
    `note` is called with the number of answered requests."""
    began, done = time.perf_counter(), 0

    def now() -> float:
        return time.perf_counter() - began

    async def ask(number: int, arrival: RecordedArrival) -> Answered:
        nonlocal done
        await asyncio.sleep(max(0.0, arrival.at - now()))
        answered, whole = Answered(now()), False
        try:
            stream = await client.completions.create(
                model=model,
                prompt=prompt_of(arrival, number, lengths),
                max_tokens=max(1, round(arrival.new * lengths)),
                stream=True,
            )
            async for chunk in stream:
                if chunk.usage is not None:
                    answered.tokens = chunk.usage.completion_tokens
                if chunk.choices and chunk.choices[0].text:
                    answered.times.append(now())
                whole |= bool(chunk.choices and chunk.choices[0].finish_reason)
            if not whole:  # a server that shuts down may close its connections properly
                answered.error = f"the answer ended after {len(answered.times)} pieces, before its end"
        except Exception as error:  # any error of one request is counted, and the others go on
            answered.error = f"{type(error).__name__}: {error}"
            answered.refused = 400 <= getattr(error, "status_code", 0) < 500
        answered.tokens, answered.ended = answered.tokens or len(answered.times), now()
        done += 1
        note(done)
        return answered

    return await asyncio.gather(*(ask(number, arrival) for number, arrival in enumerate(arrivals)))


def summary(answers: Sequence[Answered], ttft_slo: float | None, tpot_slo: float | None) -> dict[str, Any]:
    """Summarizes all requests; times in seconds, None where no request was answered. `failed`: requests without an
    answer; `refused`: those of them that the server refused; `goodput`: requests per second that kept the SLOs."""
    good = [answer for answer in answers if not answer.error]
    seconds = max((answer.ended for answer in good), default=0.0)
    starts, gaps = [answer.ttft for answer in good], [gap for answer in good for gap in answer.gaps]
    kept = sum(
        (ttft_slo is None or answer.ttft <= ttft_slo)
        and (tpot_slo is None or not answer.gaps or sum(answer.gaps) / len(answer.gaps) <= tpot_slo)
        for answer in good
    )
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "refused": sum(answer.refused for answer in answers),
        "tokens": tokens,
        "seconds": round(seconds, 6),
        "ttft_p50": quantile(starts, 0.5),
        "ttft_p99": quantile(starts, 0.99),
        "tbt_p50": quantile(gaps, 0.5),
        "tbt_p99": quantile(gaps, 0.99),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "goodput": kept / seconds if seconds else 0.0,
    }


def quantile(values: Sequence[float], part: float) -> float | None:
    """Returns the smallest of the values that at least so great a part of them does not exceed (the nearest rank);
    None of none."""
    ordered = sorted(values)
    rank = math.ceil(round(part * len(ordered), 9))  # 0.07 * 100 is a little more than 7
    return ordered[max(1, rank) - 1] if ordered else None
