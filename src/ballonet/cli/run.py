"""`ballonet run`: a script or module whose models are managed at their first use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..allocator.errors import ConfigError
from ..hooks.options import OPTIONS, ManageOptions, Option
from . import arguments


def add_run(commands: Any) -> None:
    """Describes the command."""
    text = "run a script or module, every model of it managed at its first use"
    parser = arguments.command(commands, "run", _run, text)
    arguments.add_sizes(parser)
    arguments.add_timeline(parser)
    managing = parser.add_argument_group("how models are managed, as by ballonet.manage()")
    add_options(managing)
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("-c", dest="code", action="store_true", help="PROGRAM is Python code")
    parser.add_argument("program", metavar="PROGRAM", help="a Python script")
    rest = parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the program's own arguments")
    rest.required = False  # so that only what is missing is asked for


def add_options(group: Any) -> None:
    """Adds a flag for each option of `manage()`."""
    for option in OPTIONS:
        _add_option(group, option)
    group.add_argument(
        "--trust-folder",
        metavar="DIR",
        action="append",
        help="a volume that several users share, in which everything is taken for trusted; may be given several times "
        "(default: none; BALLONET_TRUST_FOLDER)",
    )


def _run(args: argparse.Namespace) -> Callable[[], None]:
    """Prepares the program, and returns what runs it."""
    options = ManageOptions.of({option.name: vars(args)[option.name] for option in OPTIONS if option.name in args})
    from ..hooks.programs.run import find, run
    from ..offload.timeline import recorder

    if args.module and args.code:
        args.wrong("PROGRAM is either a module (-m) or code (-c)")
    if problem := find(args.program, module=args.module, code=args.code):
        print(f"{sys.executable}: {problem}", file=sys.stderr)
        sys.exit(1 if args.module else 2)  # as Python does
    if args.timeline is not None:
        recorder.check(args.timeline)  # before anything takes its time
    from ..allocator.install import install

    install(budget=args.budget, page_size=args.page_size)
    if args.timeline is not None:
        recorder.until_exit(args.timeline)
    return partial(run, args.program, args.args, options, module=args.module, code=args.code)


def _add_option(group: Any, option: Option) -> None:
    def parse(text: str) -> object:
        try:
            return option.parse(text, option.flag)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    told = {"dest": option.name, "default": argparse.SUPPRESS}
    default = "" if "default" in option.help else f"default: {'none' if option.default is None else option.default}; "
    flag, help = option.flag, f"{option.help} ({default}{option.variable})"
    if option.switch:  # what follows the flag may be PROGRAM, so a value has a flag of its own
        group.add_argument(flag, action="store_const", const=True, help=help, **told)
        flag, help = f"{flag}-{option.metavar.lower()}", "the same, in so many bytes, such as 8GiB (default: any)"
    group.add_argument(flag, metavar=option.metavar, type=parse, help=help, **told)
