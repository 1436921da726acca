"""The errors of ballonet. Each message says what failed, why, and what to do.

All derive from `BallonetError`, but for `PoolExhausted`, which the core raises for an allocation that does not fit: a
user sees `torch.OutOfMemoryError` instead. The classes with fields keep them as `args`, so that they can be pickled.
"""

from __future__ import annotations

from .units import format_size, format_time


class BallonetError(RuntimeError):
    """Base of every typed error."""


class ConfigError(BallonetError, ValueError):
    """A setting that cannot be understood or used."""


class BudgetError(BallonetError):
    """The budget is smaller than what must be resident. In bytes: `required` by all weights, `smallest` that works,
    `others`: what other models, caches and tensors have, and do not give."""

    def __init__(self, required: int, budget: int, smallest: int, others: int = 0) -> None:
        super().__init__(required, budget, smallest, others)
        self.required = required
        self.budget = budget
        self.smallest = smallest
        self.others = others

    @property
    def short(self) -> str:
        """The message in a few words."""
        return f"budget {format_size(self.budget)}, needs {format_size(self.smallest)}"

    def __str__(self) -> str:
        beside = f", {format_size(self.others)} of it used by others" if self.others else ""
        return (
            f"the weights take {format_size(self.required)} of pages, and a forward needs room beside them, but the "
            f"budget is {format_size(self.budget)} ({self.budget} bytes){beside}. The smallest budget that works is "
            f"{format_size(self.smallest)}: ballonet.set_budget({self.smallest})."
        )


class BudgetInUse(BudgetError):
    """`set_budget()` asked for less than can be given back; the budget is what it was. In bytes: `immovable` cannot be
    moved, or was not given back within `waited` seconds; `smallest`, the same number, is what works."""

    def __init__(self, immovable: int, budget: int, waited: float = 0.0) -> None:
        super().__init__(immovable, budget, immovable)
        self.args = immovable, budget, waited
        self.immovable = immovable
        self.waited = waited

    def __str__(self) -> str:
        asked = f"a budget of {format_size(self.budget)} ({self.budget} bytes) was asked for"
        if self.waited:
            return (
                f"{asked}, and after {format_time(self.waited)} {format_size(self.immovable)} of pages were still in "
                "use, by models and caches of other threads, or another budget was asked for meanwhile. The budget "
                "before is in force. To go on: give it a longer timeout, end a request, or ask for "
                f"{self.smallest} bytes or more."
            )
        return (
            f"{asked}, but {format_size(self.immovable)} of pages hold weights, caches and live tensors that cannot be "
            f"moved. The smallest budget that works now is {format_size(self.smallest)}: "
            f"ballonet.set_budget({self.smallest})."
        )


class SharedBudgetError(BallonetError):
    """A budget that processes share cannot be as requested, or does not exist."""


class LedgerDamaged(SharedBudgetError):
    """The ledger file of a shared budget is not what ballonet wrote."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return (
            f"the ledger of the shared budget, {self.path}, is damaged: {self.why}. Nobody gets more of it. End all "
            "processes that share it (`ballonet top` lists them), delete the file, and start them again"
        )


class PortInUse(ConfigError):
    """A port to listen at is another process's already."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return (
            f"another process listens on {self.host}:{self.port}: end it (ss -ltnp 'sport = :{self.port}' names it), "
            "choose another port, or port 0 for any that is free"
        )


class ExtraMissing(BallonetError):
    """A part of ballonet needs a package that is not installed. `what` needs `package`; `extra`: the group of
    dependencies that it is in."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(what, package, extra)
        self.what = what
        self.package = package
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.what} need {self.package}, which is not installed: pip install 'ballonet[{self.extra}]'"


class DriverError(BallonetError):
    """A call of the driver failed. `code` is its CUresult, `detail` the operation and what to try."""

    def __init__(self, function: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(function, code, name, detail)
        self.function = function
        self.code = code
        self.name = name
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.function} failed with {self.name} ({self.code})" + (f": {self.detail}" if self.detail else "")


class DriverUnavailable(BallonetError):
    """No usable driver: the library cannot be loaded, has no device, or lacks virtual memory."""


class CoreMissing(BallonetError):
    """The native core is not there: the package was installed, or is used, without having built it."""


class InvariantBroken(BallonetError):
    """An integrity check found the core's structures contradicting each other: a bug in ballonet."""


class InstallError(BallonetError):
    """The allocator cannot be put under torch here and now."""


class NotTrusted(BallonetError, OSError):
    """A folder or file that another user may have put there, or can write to."""


class CompanionUnavailable(BallonetError):
    """The companion, which links torch's own libraries, can be neither found nor compiled here."""


class NotInstalled(BallonetError):
    """A call needs `ballonet.install()` first."""


class UnsupportedVersion(BallonetError):
    """A version of torch or transformers that ballonet does not know."""


class ManageError(BallonetError):
    """A model cannot be managed."""


class OptionError(ManageError, ConfigError):
    """An option of `manage()` that cannot be understood or used."""


class SLOError(ManageError):
    """An SLO that cannot be kept. `slo`: seconds, the nearest that can be; `budget`: bytes of device pages with which
    this one could be; None where there is none."""

    def __init__(self, reason: str, slo: float | None, budget: int | None) -> None:
        super().__init__(reason, slo, budget)
        self.reason = reason
        self.slo = slo
        self.budget = budget

    def __str__(self) -> str:
        ways = []
        if self.slo is not None:
            ways.append(f"an SLO of {format_time(self.slo)}")
        if self.budget is not None:
            ways.append(f"a budget of {format_size(self.budget)} (ballonet.set_budget({self.budget}))")
        return self.reason + (f". What would do: {', or '.join(ways)}" if ways else "")


class RequestTooLarge(ManageError):
    """A request for text that can never run. In bytes: `needed` of KV and activations at its end; `device`, `host`:
    that there can be for it at most. `tokens`: that it has at its end, and those that a step can read at most, where
    these are too many."""

    def __init__(
        self, request: str, needed: int, device: int, host: int, tokens: tuple[int, int] | None = None
    ) -> None:
        super().__init__(request, needed, device, host, tokens)
        self.request = request
        self.needed = needed
        self.device = device
        self.host = host
        self.tokens = tokens

    def __str__(self) -> str:
        if self.tokens is not None:
            return (
                f"{self.request} has {self.tokens[0]} tokens at its end, and a step can read {self.tokens[1]} beside "
                "the new tokens of a batch: ask for fewer tokens, raise the budget, or let a batch have fewer new ones "
                "(max_batch_tokens, serve --batch-tokens)"
            )
        needed, device, host = map(format_size, (self.needed, self.device, self.host))
        return (
            f"{self.request} needs {needed} of KV and activations, of which the device can have {device} and the host "
            f"{host}: ask for fewer tokens, or raise the budget"
        )


class SequenceTooLong(ManageError):
    """A request for more tokens than the model can tell apart. In tokens: `prompt`, `new` that it asks for, `longest`
    sequence of the model."""

    def __init__(self, request: str, prompt: int, new: int, longest: int) -> None:
        super().__init__(request, prompt, new, longest)
        self.request = request
        self.prompt = prompt
        self.new = new
        self.longest = longest

    def __str__(self) -> str:
        asked = f"{self.request} has {self.prompt} tokens and asks for {self.new} more"
        left = self.longest - self.prompt
        todo = f"ask for {left} at most" if left > 0 else f"send fewer than {self.longest}"
        return f"{asked}, and the model's longest sequence has {self.longest}: {todo}"


class AlreadyManaged(ManageError):
    """The model, or a part of it, is managed already."""


class ModelInUse(ManageError):
    """A forward of the model is running, which reads its weights where they are now."""


class ForkedProcess(ManageError):
    """A child of a fork wants to use the device that its parent uses."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} in the child of a fork, which cannot use the device of its parent: start processes by "
            "`spawn` (multiprocessing.get_context('spawn'), DataLoader(multiprocessing_context='spawn')), or before "
            "ballonet.install()"
        )


class WrongDevice(ManageError):
    """The model lies on a device other than the one ballonet was installed for."""


class DropRefused(ManageError):
    """Layers of a replica cannot be dropped now: nothing has changed, and pages have to come from elsewhere."""


class WeightsFileError(ManageError):
    """A file of weights cannot be used."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class WeightsFileChanged(WeightsFileError):
    """A file that weights are copied from is no longer what it was."""


class SpliceError(BallonetError):
    """A part of a model's layers cannot be run as requested, or not at all."""


class TraceError(BallonetError):
    """A recorded trace is damaged. `line` counts from 1, 0 where no line is to blame."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path = path
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.reason}"


class ControlError(BallonetError):
    """Another process that runs ballonet cannot be asked. `pid`: which."""

    def __init__(self, pid: int, reason: str) -> None:
        super().__init__(pid, reason)
        self.pid = pid
        self.reason = reason

    def __str__(self) -> str:
        return f"process {self.pid} {self.reason}"


class NoSuchProcess(ControlError):
    """There is no process of that number."""


class NotPermitted(ControlError):
    """The process belongs to another user."""


class NotReachable(ControlError):
    """Ballonet is not installed there, does not listen, or does not answer."""


class ControlRefused(ControlError):
    """The request raised an error in the other process; `kind` is the name of its class."""

    def __init__(self, pid: int, reason: str, kind: str) -> None:
        BallonetError.__init__(self, pid, reason, kind)
        self.pid = pid
        self.reason = reason
        self.kind = kind

    def __str__(self) -> str:
        return f"process {self.pid} refused: {self.reason}"


class PoolExhausted(MemoryError):
    """No page is free and nothing more can be reclaimed."""
