"""The replay of recorded requests against a server, with OpenAI's client, whose latencies are summarized."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from .arrivals import RecordedArrival

# headers of a request: its SLOs to the first token, and of a decode step, as "80ms"
SLOS: Final = ("x-ttft-slo", "x-tpot-slo")
# words that most tokenizers have as one token each
WORDS: Final = """
    the of and to in is it that he was for on are as with his they at be this from have or by one had not but what all
    were when we there can an your which their said if do will each about how up out them then she many some so
""".split()  # noqa: SIM905 (fifty lines otherwise)


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
        words += draw.choices(WORDS, k=min(wanted - len(words), max(1, round(arrival.block_tokens * lengths))))
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
    """Summarizes all requests; times in seconds. `failed`: requests without an answer; `refused`: those of them that
    the server refused. To percentiles a failed request is one that is answered never: None where so many failed.
    `goodput`: requests per second that kept the SLOs, `tpot_slo` in each of their gaps; `kept`: how many did."""
    good = [answer for answer in answers if not answer.error]
    never = [math.inf] * (len(answers) - len(good))
    seconds = max((answer.ended for answer in good), default=0.0)
    starts = [*(answer.ttft for answer in good), *never]
    gaps = [*(gap for answer in good for gap in answer.gaps), *never]
    kept = sum(
        (ttft_slo is None or answer.ttft <= ttft_slo)
        and (tpot_slo is None or all(gap <= tpot_slo for gap in answer.gaps))
        for answer in good
    )
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "refused": sum(answer.refused for answer in answers),
        "tokens": tokens,
        "seconds": round(seconds, 6),
        **{
            f"{what}_p{percent}": None if (value := quantile(values, percent / 100)) == math.inf else value
            for what, values in (("ttft", starts), ("tbt", gaps))
            for percent in (50, 99)
        },
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "kept": kept,
        "goodput": kept / seconds if seconds else 0.0,
    }


def quantile(values: Sequence[float], part: float) -> float | None:
    """Returns the smallest of the values that at least so great a part of them does not exceed (the nearest rank);
    None of none."""
    ordered = sorted(values)
    rank = math.ceil(round(part * len(ordered), 9))  # 0.07 * 100 is a little more than 7
    return ordered[max(1, rank) - 1] if ordered else None
