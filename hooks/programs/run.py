"""`ballonet run`: runs an unmodified program with its models in the pool.

The program runs as `__main__`, with the same arguments, path, tracebacks and exit code as without ballonet.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from ..options import ManageOptions

NOTHING_MANAGED: Final = (
    "ballonet: no model of transformers was called in this process, so nothing was managed. A program that it starts "
    "is a process of its own: launch it with ballonet inside, as in `accelerate launch -m ballonet run script.py`"
)
_LAUNCHERS = ("ballonet.__main__", __name__, "runpy")  # modules whose frames come before the program's first


def find(program: str, *, module: bool, code: bool = False) -> str | None:
    """Puts the program's folder on the path, as Python does. Returns what is wrong where there is no program."""
    if code:
        if not sys.flags.safe_path:
            sys.path[0] = ""
        return None
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(program))
    if module:
        return None if _importable(program) else f"No module named {program}"
    absolute = os.path.abspath(program)
    return None if os.path.exists(program) else f"can't open file {absolute!r}: [Errno 2] No such file or directory"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package does not exist
        return False


def run(program: str, args: Sequence[str], options: ManageOptions, *, module: bool, code: bool = False) -> None:
    """Runs a script, or with `module` a module by its name, or with `code` the text itself, and manages its models with
    `options` at their first use. Reports on stderr, at the end, if there was no model.

    ballonet is installed already and `find` has found the program. Raises the program's errors.
    """
    from .first_use import FirstUse

    class Used(FirstUse):
        """Notes whether there was any model."""

        any = False

        def _take(self, model: Any) -> Any:
            import torch

            if not torch.compiler.is_compiling():
                self.any = True
            return super()._take(model)

    watching, process = Used(options), os.getpid()
    sys.argv = ["-c" if code else program, *args]
    _shorten_tracebacks()
    try:
        _run(program, module, code)
    except SystemExit:
        _tell(watching.any, process)
        raise
    _tell(watching.any, process)


def _tell(any_model: bool, process: int) -> None:
    """Reports, after a program that ended by itself, what was managed and what was not."""
    from ..managed import report  # imports torch

    if os.getpid() == process:
        print(f"ballonet: {report().conclusion}" if any_model else NOTHING_MANAGED, file=sys.stderr)


def _run(program: str, module: bool, code: bool) -> None:
    if code:
        _execute(compile(program, "<string>", "exec", dont_inherit=True), None)
    elif module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif os.path.isfile(program) and not zipfile.is_zipfile(program):
        path = os.path.abspath(program)
        _execute(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), path)
    else:
        runpy.run_path(os.path.abspath(program), run_name="__main__")  # a folder or an archive


def _execute(code: CodeType, path: str | None) -> None:
    """Runs code as `__main__` for good: runpy would take the name back before the script's threads and exit functions
    end."""
    module = ModuleType("__main__")
    if path is not None:
        module.__file__ = path
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _shorten_tracebacks() -> None:
    """Prints uncaught exceptions from the program's first frame on."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and _launches(trace):
            trace = trace.tb_next
        before(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _launches(trace: TracebackType) -> bool:
    return getattr(trace.tb_frame.f_globals.get("__spec__"), "name", None) in _LAUNCHERS
