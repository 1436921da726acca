"""`serve`, an OpenAI-compatible server, its models managed on one pool, and `load`: recorded requests
replayed against a server, and how fast it answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..allocator.config import parse_size
from ..allocator.errors import ConfigError, ManageError
from ..hooks.options import OPTIONS, ManageOptions
from ..hooks.watch.endpoint import listen
from . import arguments, serve_replicas
from .arguments import noting, say
from .run import add_options

if TYPE_CHECKING:
    from ..hooks.server.anteroom import Anteroom
    from ..hooks.server.application import Address


def add_serve(commands: Any) -> None:
    """Describes the command."""
    text = "serve models to OpenAI's clients, many requests and several models at once on one pool"
    parser = arguments.command(commands, "serve", _serve, text)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name on the Hugging Face hub, or a folder")
    arguments.add_sizes(parser)
    parser.add_argument(
        "--host-budget",
        metavar="SIZE",
        help="host pages, such as 64GiB; 0: none (default: a quarter of the RAM; BALLONET_HOST_BUDGET)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=arguments.whole(1, 65535), default=8000, help="port to listen at (default: 8000)"
    )
    _add_doors(parser.add_argument_group("who may ask"))
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        help="names that clients ask for, one for each model (default: as the models are given)",
    )
    parser.add_argument(
        "--allow-client-templates",
        action="store_true",
        help="requests may bring a chat template, which is a program of the client's (default: they may not)",
    )
    parser.add_argument(
        "--waiting",
        metavar="N",
        type=arguments.count,
        default=1024,
        help="requests of a model that may wait, before others get HTTP 429 (default: 1024)",
    )
    parser.add_argument(
        "--grace",
        metavar="TIME",
        type=arguments.seconds,
        default=30.0,
        help="that running requests have to end in after SIGTERM or Ctrl-C (default: 30s)",
    )
    parser.add_argument(
        "--block-size", metavar="N", type=arguments.count, help="tokens of a block of KV (default: 256)"
    )
    parser.add_argument(
        "--batch-tokens",
        metavar="N",
        type=arguments.count,
        help="new tokens of a batch at most (default: as the budget allows)",
    )
    parser.add_argument(
        "--replicas",
        metavar="N",
        type=arguments.whole(1, 4096),
        help="replicas of the one model, each with the budget, which drop layers for KV in a burst (default: none)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="of a Ray whose actors replicas are, and whose token is in RAY_AUTH_TOKEN; without --replicas this is one "
        "more front end of those that are there. off: processes of this machine (default: a Ray of this machine, "
        "or off where ray is not installed)",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="what the controller of the replicas is told and answers, JSON lines; FILE.1 has what came before "
        "512 MiB (default: none)",
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        type=Path,
        help="what batches of a replica take, as JSON; where there is no such file it is measured, which takes some "
        "seconds of each start, and written by the server. As for whatif (default: none)",
    )
    parser.add_argument(
        "--silent",
        metavar="TIME",
        type=arguments.seconds,
        help="a replica is lost where it stands still for so long, and for longer than some of its batches take "
        "(default: 1s). More where other work takes the processors",
    )
    arguments.add_timeline(parser)
    parser.add_argument(
        "--json", action="store_true", help="one line of JSON on stdout once it is ready: ready, url, models, pid"
    )
    add_options(parser.add_argument_group("how models are managed, as by ballonet.manage()"))


def _add_doors(group: Any) -> None:
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients have to send as `Authorization: Bearer KEY`. Everybody on this machine can read it in the "
        "list of processes: rather give --api-key-file, or BALLONET_API_KEY (default: no key is needed)",
    )
    group.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file with the key (default: none)")
    group.add_argument(
        "--no-api-key",
        action="store_true",
        help="no key is needed, though --host may be reached from other machines (default: then one is)",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name that clients without a key may call this server by, beside localhost, --host and addresses; may "
        "be given several times (default: none)",
    )
    group.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="web pages that may ask, such as https://chat.example, or *; may be given several times (default: none)",
    )
    group.add_argument(
        "--max-body", metavar="SIZE", help="largest body of a request (default: by the longest sequence of a model)"
    )


def _serve(args: argparse.Namespace) -> Callable[[], None]:
    """Listens, loads the models, and returns what serves them."""
    options = ManageOptions.of({option.name: vars(args)[option.name] for option in OPTIONS if option.name in args})
    try:
        from ..hooks.server.anteroom import Anteroom
        from ..hooks.server.application import Address
        from ..hooks.server.doors import Doors, read_key
    except ModuleNotFoundError as error:
        raise ManageError(f"serving needs {error.name}: pip install 'ballonet[serve]'") from error
    from ..offload.timeline import recorder

    key = read_key(args.api_key, args.api_key_file)
    if args.host not in serve_replicas.LOCAL and key is None and not args.no_api_key:
        raise ConfigError(f"whoever reaches {args.host} could ask: give it a key by --api-key-file, or --no-api-key")
    hosts = frozenset(name.lower() for name in (*args.allow_host, args.host))
    max_body = None if args.max_body is None else parse_size(args.max_body, "--max-body")
    doors = Doors(key, hosts, frozenset(args.allow_origin), max_body)
    names = tuple(args.served_model_name or args.models)
    if len(names) != len(args.models) or len(set(names)) != len(names):
        raise ConfigError("--served-model-name: give as many names as models, and no two the same")
    own = args.allow_client_templates
    address = Address(args.host, args.port, doors, args.waiting, args.grace, args.json, names, own)
    replicated = serve_replicas.is_replicated(args, options)
    if not replicated:
        for name, why in (
            ("log", "it writes what their controller decides"),
            ("silent", "it says when one of them is lost"),
            ("costs", "it says what their batches take"),
        ):
            if vars(args)[name] is not None:
                raise ConfigError(f"--{name} is of the server that has --replicas: {why}")
        if args.timeline is not None:
            recorder.check(args.timeline)  # before anything takes its time
    anteroom = Anteroom(listen(args.host, args.port), say)
    try:
        if replicated:
            run = serve_replicas.server(args, address, anteroom.say)
        else:
            run = _loaded(args, address, options, anteroom.say)
    except BaseException:
        anteroom.close()
        raise
    return partial(run, anteroom)


def _loaded(
    args: argparse.Namespace, address: Address, options: ManageOptions, say: Callable[[str], None]
) -> Callable[[Anteroom], None]:
    """Loads the models, and returns what serves them."""
    from ..allocator import devices
    from ..allocator.install import install
    from ..hooks.server.loading import suitable
    from ..hooks.server.server import Server
    from ..offload.timeline import recorder

    page_size = args.page_size or suitable(args.models, args.budget, say)
    install(budget=args.budget, page_size=page_size, host_budget=args.host_budget)
    if args.timeline is not None:
        recorder.until_exit(args.timeline)
    given = {"page_size": args.block_size, "max_batch_tokens": args.batch_tokens}
    batching = {name: value for name, value in given.items() if value is not None}
    return Server(args.models, devices.require(), options, address, say, **batching).run


def add_load(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "load", _load, "replay recorded requests against a server, and time it")
    parser.description = f"""{parser.description} Prints one line of JSON: requests, failed, refused (those that
        failed by HTTP 4xx), tokens, seconds, ttft_p50, ttft_p99, tbt_p50, tbt_p99 (seconds; null where more failed than
        a percentile leaves out), tokens_per_second, kept (requests within the SLOs, in each gap between two tokens),
        goodput (how many of them a second). Exits with 1 where all requests failed. Traces: CSV of Azure (2023,
        2024), of BurstGPT, of lengths (num_prefill_tokens, num_decode_tokens) or of the turns of conversations; JSON of
        Mooncake, Qwen-Bailian, ShareGPT (with --tokenizer), or what `vllm bench serve --save-result --save-detailed`
        has written."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a file of requests: see above")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", required=True, help="the model that is asked")
    parser.add_argument("--api-key", metavar="KEY", help="what the server wants to be sent (default: BALLONET_API_KEY)")
    arguments.add_requests(parser)
    arguments.add_only_json(parser)
    parser.add_argument("--ask", action="store_true", help="each request asks the server for the SLOs, too")


def _load(args: argparse.Namespace) -> None:
    from ..hooks.server.load import headers, replay, summary

    try:
        from openai import AsyncOpenAI

        from ..hooks.server.doors import read_key
    except ModuleNotFoundError as error:
        raise ManageError("a load needs OpenAI's client: pip install 'ballonet[serve]'") from error
    arrivals = arguments.recorded(args, args.trace)

    key = read_key(args.api_key, None) or "none"  # the client wants one
    settings: dict[str, Any] = {"base_url": f"{args.url}/v1", "api_key": key, "max_retries": 0, "timeout": 600}
    asked = headers(args.ttft_slo, args.tpot_slo) if args.ask else {}

    async def run() -> tuple[dict[str, Any], str]:
        async with AsyncOpenAI(**settings, default_headers=asked) as client:
            answers = await replay(arrivals, client, args.model, float(args.lengths), noting(len(arrivals)))
        failed = next((answer.error for answer in answers if answer.error), "")
        return summary(answers, args.ttft_slo, args.tpot_slo), failed

    result, failed = asyncio.run(run())
    print(json.dumps(result), flush=True)
    if result["failed"] == result["requests"]:
        raise ManageError(f"all requests failed, the first one as {failed}")
    if failed:
        print(f"ballonet: the first request that failed: {failed}", file=sys.stderr)
