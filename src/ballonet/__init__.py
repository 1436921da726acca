"""ballonet: the weights, activations and KV cache of Hugging Face models in one elastic pool of pages.

    ballonet.install(budget="24GiB")    # before the first CUDA allocation
    ballonet.manage(model)              # weights into fixed ranges, elastic KV
    model.generate(...)                 # unmodified
    ballonet.stats()                    # who owns which page
    ballonet.watch()                    # the same of all processes of this user, live in a notebook
    ballonet.metrics.serve(9400)        # the same for Prometheus
    model = ballonet.from_pretrained("org/model")    # one that is larger than the device, and managed

Importing this package imports neither torch nor transformers; a name that needs them does so when it is first used.

Note [One name for two things]
    `ballonet.allocator` is the room of that name, a subpackage, and `ballonet.allocator()` is what
    `torch.cuda.memory.change_current_allocator` takes. Importing any module of the room binds the name to the room,
    whatever was bound before, so the room itself can be called (allocator/__init__.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .allocator.errors import (
    AlreadyManaged,
    BallonetError,
    BudgetError,
    BudgetInUse,
    CompanionUnavailable,
    ConfigError,
    ControlError,
    ControlRefused,
    CoreMissing,
    DriverError,
    DriverUnavailable,
    DropRefused,
    ExtraMissing,
    ForkedProcess,
    InstallError,
    InvariantBroken,
    LedgerDamaged,
    ManageError,
    ModelInUse,
    NoSuchProcess,
    NotInstalled,
    NotPermitted,
    NotReachable,
    NotTrusted,
    OptionError,
    PoolExhausted,
    PortInUse,
    RequestTooLarge,
    SequenceTooLong,
    SharedBudgetError,
    SLOError,
    SpliceError,
    TraceError,
    UnsupportedVersion,
    WeightsFileChanged,
    WeightsFileError,
    WrongDevice,
)

if TYPE_CHECKING:
    from . import metrics
    from .allocator.devices import set_budget
    from .allocator.install import allocator, install, restore
    from .allocator.stats import Stats, stats
    from .hooks.kv.cache import KVCache
    from .hooks.loading import from_pretrained
    from .hooks.manage import manage, sleep, wake
    from .hooks.managed import Managed, report
    from .hooks.memory_snapshot import snapshot
    from .hooks.plan.planner import plan
    from .hooks.programs.first_use import load_ipython_extension, unload_ipython_extension
    from .hooks.replicas.errors import (
        Interrupted,
        JoinRefused,
        LinkClosed,
        LinkError,
        NoAnswer,
        OtherModel,
        ReplicaError,
        SecretRefused,
        SupervisorLost,
    )
    from .hooks.session import Session
    from .hooks.watch.view import watch
    from .offload.timeline.recorder import timeline

__version__ = "0.2.0"

_HOMES = {
    "ReplicaError": "hooks.replicas.errors",
    "LinkError": "hooks.replicas.errors",
    "LinkClosed": "hooks.replicas.errors",
    "NoAnswer": "hooks.replicas.errors",
    "Interrupted": "hooks.replicas.errors",
    "SupervisorLost": "hooks.replicas.errors",
    "JoinRefused": "hooks.replicas.errors",
    "SecretRefused": "hooks.replicas.errors",
    "OtherModel": "hooks.replicas.errors",
    "KVCache": "hooks.kv.cache",
    "Managed": "hooks.managed",
    "Session": "hooks.session",
    "Stats": "allocator.stats",
    "from_pretrained": "hooks.loading",
    "install": "allocator.install",
    "load_ipython_extension": "hooks.programs.first_use",
    "manage": "hooks.manage",
    "plan": "hooks.plan.planner",
    "report": "hooks.managed",
    "restore": "allocator.install",
    "set_budget": "allocator.devices",
    "sleep": "hooks.manage",
    "snapshot": "hooks.memory_snapshot",
    "stats": "allocator.stats",
    "timeline": "offload.timeline.recorder",
    "wake": "hooks.manage",
    "watch": "hooks.watch.view",
    "unload_ipython_extension": "hooks.programs.first_use",
}
_MODULES = ("metrics",)  # of the facade, imported when they are first used

__all__ = [
    "AlreadyManaged",
    "BallonetError",
    "BudgetError",
    "BudgetInUse",
    "CompanionUnavailable",
    "ConfigError",
    "ControlError",
    "ControlRefused",
    "CoreMissing",
    "DriverError",
    "DriverUnavailable",
    "DropRefused",
    "ExtraMissing",
    "ForkedProcess",
    "InstallError",
    "Interrupted",
    "InvariantBroken",
    "JoinRefused",
    "KVCache",
    "LedgerDamaged",
    "LinkClosed",
    "LinkError",
    "ManageError",
    "Managed",
    "ModelInUse",
    "NoAnswer",
    "NoSuchProcess",
    "NotInstalled",
    "NotPermitted",
    "NotReachable",
    "NotTrusted",
    "OptionError",
    "OtherModel",
    "PoolExhausted",
    "PortInUse",
    "ReplicaError",
    "RequestTooLarge",
    "SLOError",
    "SecretRefused",
    "SequenceTooLong",
    "Session",
    "SharedBudgetError",
    "SpliceError",
    "Stats",
    "SupervisorLost",
    "TraceError",
    "UnsupportedVersion",
    "WeightsFileChanged",
    "WeightsFileError",
    "WrongDevice",
    "__version__",
    "allocator",
    "from_pretrained",
    "install",
    "load_ipython_extension",
    "manage",
    "metrics",
    "plan",
    "report",
    "restore",
    "set_budget",
    "sleep",
    "snapshot",
    "stats",
    "timeline",
    "unload_ipython_extension",
    "wake",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
