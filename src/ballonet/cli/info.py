"""`python -m ballonet info`: what works on this machine, or of a model's KV cache, what not, and why."""

from __future__ import annotations

import argparse
from typing import Any

from .. import __version__
from ..allocator.config import Config
from . import arguments
from .output import tell


def add(commands: Any) -> None:
    """Describes the command."""
    text = "what works on this machine or of a model's KV cache, what not, and why"
    parser = arguments.command(commands, "info", _info, text)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a name on the hub or a type such as llama")
    parser.add_argument(
        "--batch", metavar="N", type=arguments.count, default=1, help="sequences side by side (default: 1)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=arguments.count, default=4096, help="tokens of each (default: 4096)"
    )
    arguments.add_json(parser)


def _info(args: argparse.Namespace) -> None:
    if args.model is None:
        from ..allocator import info

        tell(info.gather(Config.from_env(), __version__), info.show, as_json=args.json)
    else:
        from ..hooks.programs import model_info

        facts = model_info.gather(args.model, Config.from_env(), args.batch, args.tokens)
        tell(facts, model_info.show, as_json=args.json)
