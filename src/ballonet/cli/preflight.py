"""`python -m ballonet preflight`: tries what ballonet assumes of the device and its driver."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..allocator.config import Config
from . import arguments
from .output import tell


def add(commands: Any) -> None:
    """Describes the command."""
    text = "try what ballonet assumes of the device and its driver; a minute or two"
    parser = arguments.command(commands, "preflight", _preflight, text)
    parser.description = f"""{parser.description} Whatever fails is told, and does not end the others. What differs is
        gone round where that can be: `install()` keeps to what was chosen, on this device and driver, until the next
        preflight."""
    parser.add_argument("--out", metavar="FILE", help="and write it there")
    parser.add_argument("--no-save", action="store_true", help="choose nothing: install() stays as it is")
    arguments.add_json(parser)


def _preflight(args: argparse.Namespace) -> None:
    from ..allocator import device_choice, findings
    from ..allocator.config import cache_dir
    from ..allocator.preflight import run
    from ..allocator.units import steps

    config = Config.from_env()
    target = device_choice.choose(config)
    with steps("asking", len(run.PROBES)) as told:
        result = run.preflight(target, begun=told)
    kept = None if args.no_save else findings.save(cache_dir(config), result["key"], result)
    if args.out is not None:
        run.write(result, Path(args.out))
    tell(result, lambda report: run.show(report, kept), as_json=args.json)
