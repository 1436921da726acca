"""One probe, in a process of its own: `python -m ballonet.allocator.preflight.child NAME LIBRARY ORDINAL`.

Each fact is a line of JSON on stdout.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys

from .cuda import Cuda, DriverMissing
from .measure import tell
from .run import PROBES


def main(name: str, library: str, ordinal: int) -> None:
    probe = PROBES[name]
    faulthandler.dump_traceback_later(0.9 * probe.seconds)  # where one that hangs is
    ask = getattr(importlib.import_module(f".{probe.module}", __package__), name)
    try:
        ask(tell, library, ordinal) if probe.uses_torch else ask(Cuda(library, ordinal), tell)
    except DriverMissing as error:
        tell("skipped", str(error))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
