"""`python -m ballonet load`: recorded requests replayed against a server, and how fast it answered."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from ..allocator.errors import ManageError
from . import arguments


def add(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "load", _load, "replay recorded requests against a server, and time it")
    parser.description = f"""{parser.description} Prints one line of JSON: requests, failed, refused (those that
        failed by HTTP 4xx), tokens, seconds, ttft_p50, ttft_p99, tbt_p50, tbt_p99 (seconds), tokens_per_second, goodput
        (requests per second within the SLOs). Exits with 1 where all requests failed."""
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="a file of requests: Azure's, Mooncake's, or of lengths"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", required=True, help="the model that is asked")
    parser.add_argument("--api-key", metavar="KEY", default="none", help="what the server wants to be sent")
    arguments.add_requests(parser)
    arguments.add_only_json(parser)
    parser.add_argument("--ask", action="store_true", help="each request asks the server for the SLOs, too")


def _load(args: argparse.Namespace) -> None:
    from ..hooks.server.load import headers, read, replay, summary

    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError as error:
        raise ManageError("a load needs OpenAI's client: pip install 'ballonet[serve]'") from error
    arrivals = read(args.trace, limit=args.limit, rate=float(args.rate), scale=float(args.scale))

    def note(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {len(arrivals)} requests", end="\n" if done == len(arrivals) else "", file=sys.stderr)

    settings = {"base_url": f"{args.url}/v1", "api_key": args.api_key, "max_retries": 0, "timeout": 600}
    asked = headers(args.ttft_slo, args.tpot_slo) if args.ask else {}

    async def run() -> tuple[dict[str, Any], str]:
        async with AsyncOpenAI(**settings, default_headers=asked) as client:
            answers = await replay(arrivals, client, args.model, float(args.lengths), note)
        failed = next((answer.error for answer in answers if answer.error), "")
        return summary(answers, args.ttft_slo, args.tpot_slo), failed

    result, failed = asyncio.run(run())
    print(json.dumps(result), flush=True)
    if result["failed"] == result["requests"]:
        raise ManageError(f"all requests failed, the first one as {failed}")
    if failed:
        print(f"ballonet: the first request that failed: {failed}", file=sys.stderr)
