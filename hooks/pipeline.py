"""A pipeline of several modules, each managed: those that are idle give their layers to the one that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from torch import nn

from .managed import Managed
from .measure.report import Report


def modules_of(pipeline: object) -> dict[str, nn.Module]:
    """The modules of a pipeline by name: its `components`, as diffusers has them, else its attributes; each once, and
    not those inside of another."""
    named = getattr(pipeline, "components", None)
    parts = named if isinstance(named, Mapping) else getattr(pipeline, "__dict__", {})
    modules = {str(name): part for name, part in parts.items() if isinstance(part, nn.Module)}
    inside = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    once = {id(module): name for name, module in reversed(modules.items()) if id(module) not in inside}
    return {name: module for name, module in modules.items() if once.get(id(module)) == name}


class ManagedPipeline:
    """The managed modules of one pipeline, `parts` by name. A context manager that releases them."""

    def __init__(self, modules: Mapping[str, nn.Module], manage: Callable[[nn.Module], Managed]) -> None:
        """Manages all or none. Raises as `manage`."""
        self.parts: dict[str, Managed] = {}
        try:
            for name, module in modules.items():
                self.parts[name] = manage(module)
        except BaseException:
            self.release()
            raise

    def report(self) -> dict[str, Report]:
        """Returns the report of each module."""
        return {name: managed.report() for name, managed in self.parts.items()}

    def sleep(self, level: int = 1, *, timeout: float | None = None) -> None:
        """Puts all modules to sleep, as `Managed.sleep`."""
        for managed in self.parts.values():
            managed.sleep(level, timeout=timeout)

    def wake(self) -> None:
        """Wakes all modules, as `Managed.wake`."""
        for managed in self.parts.values():
            managed.wake()

    def release(self) -> None:
        """Releases all modules, as `Managed.release`."""
        while self.parts:
            name, managed = next(reversed(self.parts.items()))
            managed.release()
            del self.parts[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<ManagedPipeline: {', '.join(map(repr, self.parts.values()))}>"
