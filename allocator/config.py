"""Settings: their syntax, defaults and variables. The only reader of the environment.

A setting is given to `ballonet.install()`, or else by its environment variable, or else has a default that
`runtime` works out. The options of `manage()` are in hooks/options.py.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, Final, Self, SupportsIndex

from .errors import ConfigError
from .units import format_size as format_size

_UNITS: Final = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_TIMES: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zµ]*)\s*", re.IGNORECASE)


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        return None
    number = float(match[1]) if "." in match[1] else int(match[1])
    return number * units[match[2].lower()]


def parse_size(value: SupportsIndex | str, name: str = "size") -> int:
    """Parses bytes: `"24GiB"`, `"1.5GB"`, `"4096"` or an int; `GiB` and `G` are 2**30, `GB` is 10**9. ConfigError."""
    nbytes: float | None = None
    if isinstance(value, str):
        nbytes = _quantity(value, _UNITS)
    elif isinstance(value, SupportsIndex) and not isinstance(value, bool):
        nbytes = index(value)
    if nbytes is None or nbytes < 1:
        raise ConfigError(
            f"{name} is {value!r}, which is no size: write a positive number of bytes, or one with a unit such as "
            "'512MiB', '1.5GB' or '24GiB'"
        )
    return int(nbytes)


def parse_host_budget(value: SupportsIndex | str, name: str = "host_budget") -> int:
    """Parses as `parse_size`, or 0: no host pages at all. ConfigError."""
    nothing = _quantity(value, _UNITS) == 0 if isinstance(value, str) else value is not False and value == 0
    return 0 if nothing else parse_size(value, name)


def parse_time(value: float | str, name: str = "time") -> float:
    """Parses seconds: `"80ms"`, `"250us"`, `"2s"` or a number of seconds. ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    seconds = _quantity(value, _TIMES) if isinstance(value, str) else None
    if seconds is None:
        raise ConfigError(
            f"{name} is {value!r}, which is no time: write seconds, or a number with a unit such as '80ms'"
        )
    return seconds


def parse_bandwidth(value: SupportsIndex | str, name: str = "bandwidth") -> int:
    """Parses bytes per second: `"8GB/s"`, `"500MiB/s"` or an int. ConfigError."""
    text = value.strip() if isinstance(value, str) else value
    try:
        return parse_size(text[:-2] if isinstance(text, str) and text.lower().endswith("/s") else text)
    except ConfigError:
        raise ConfigError(
            f"{name} is {value!r}, which is no bandwidth: write bytes per second, or a size per second such as '8GB/s'"
        ) from None


def _parse_seed(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise ConfigError(f"{name} is {text!r}: write a seed, a whole number that is not negative")
    return int(text)


API_KEY: Final = "BALLONET_API_KEY"  # of a server (hooks/server/doors.py); only it has this variable

_SWITCH: Final = {
    "1": True,
    "on": True,
    "true": True,
    "yes": True,
    "0": False,
    "off": False,
    "false": False,
    "no": False,
}


def _parse_switch(text: str, name: str) -> bool:
    if text.strip().lower() not in _SWITCH:
        raise ConfigError(f"{name} is {text!r}: write 1 or 0")
    return _SWITCH[text.strip().lower()]


def parse_prefix_cache(value: SupportsIndex | str | bool, name: str = "prefix_cache") -> int | bool:
    """Parses True or False, also as a text, or the bytes that the cache may take, as `parse_size`. ConfigError."""
    if isinstance(value, bool):
        return value
    known = _SWITCH.get(value.strip().lower()) if isinstance(value, str) else None
    return parse_size(value, name) if known is None else known


def _parse_faults(text: str, name: str) -> tuple[tuple[str, int], ...]:
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(cu[A-Z]\w*(?:=[1-9][0-9]*)?):([1-9][0-9]*)", entry)
        if match is None:
            raise ConfigError(
                f"{name} has {entry!r}: write FUNCTION:N, such as 'cuMemMap:7' for the seventh call of it, or "
                "FUNCTION=CODE:N for a CUresult other than the usual, several separated by commas"
            )
        faults.append((match[1], int(match[2])))
    return tuple(faults)


def _parse_device(text: str, name: str) -> str:
    device = text.strip().lower()
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
        raise ConfigError(f"{name} is {text!r}: write 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


def _parse_peer(text: str, name: str) -> str:
    peer = text.strip().lower()
    if not re.fullmatch(r"none|auto|same|cuda:[0-9]+", peer):
        raise ConfigError(f"{name} is {text!r}: write 'none', 'auto', 'same' (a second pool) or 'cuda:N'")
    return peer


def _parse_folders(text: str) -> tuple[Path, ...]:
    return tuple(Path(os.path.abspath(os.path.expanduser(part))) for part in text.split(os.pathsep) if part.strip())


@dataclass(frozen=True, slots=True)
class Config:
    """The settings. None where one was not given and its default depends on the machine."""

    budget: int | None = None  # bytes of device pages
    page_size: int | None = None  # bytes
    host_budget: int | None = None  # bytes of host pages; 0: none are used
    peer: str | None = None  # none | auto | same | cuda:N; None: auto where there is a budget for it, else none
    peer_budget: int | None = None  # bytes of pages of the peer
    host_pages: bool | None = None  # may bytes lie on host pages? None: unless a preflight found that they cannot
    graphs: bool | None = None  # may models decode by CUDA graphs? None: unless a preflight found that they are wrong
    spill: bool | None = None  # may allocations that fit nowhere else lie on host pages? None: yes
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    libcuda: str | None = None  # path of the driver's library
    link_bandwidth: int = 0  # bytes/s between host and device on the stand-in; 0: as fast as memory
    link_latency: float = 0.0  # seconds added to each such copy
    peer_bandwidth: int = 0  # bytes/s between the device and its peer on the stand-in; 0: as fast as memory
    chaos: int | None = None  # seed; None: no chaos
    reserve: float = 60.0  # seconds that pages which a model's KV had in use are kept free for it beside other models
    turn: float = 8.0  # seconds that requests wait for other models' turns, where all have no room; 0: there are none
    faults: tuple[tuple[str, int], ...] = ()  # (driver function, which call of it fails)
    replica_faults: Path | None = None  # file of faults of replicas (testing/replica_faults.py); None: none
    control: bool = True  # may `ballonet budget` ask this process?
    cache_dir: Path | None = None  # of files compiled or measured once; None: the user's cache folder
    trust_folders: tuple[Path, ...] = ()  # folders of several users in which everything is trusted

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The settings of the `BALLONET_*` variables; empty ones count as unset. ConfigError names the variable."""
        texts = variables(VARIABLES, environ)
        return cls(**{VARIABLES[name][0]: VARIABLES[name][1](text, name) for name, text in texts.items()})

    def merge(
        self,
        *,
        budget: SupportsIndex | str | None = None,
        page_size: SupportsIndex | str | None = None,
        host_budget: SupportsIndex | str | None = None,
        peer: str | None = None,
        peer_budget: SupportsIndex | str | None = None,
        device: object = None,
        spill: bool | None = None,
    ) -> Self:
        """Returns these settings, with those that were given as arguments over them. ConfigError."""
        given: dict[str, Any] = {
            name: parse(value, name)
            for name, value, parse in (
                ("budget", budget, parse_size),
                ("page_size", page_size, parse_size),
                ("host_budget", host_budget, parse_host_budget),
                ("peer_budget", peer_budget, parse_size),
            )
            if value is not None
        }
        if peer is not None:
            given["peer"] = _parse_peer(str(peer), "peer")
        if device is not None:
            given["device"] = _parse_device(str(device), "device")
        if spill is not None:
            if not isinstance(spill, bool):
                raise ConfigError(f"spill is {spill!r}: write True or False")
            given["spill"] = spill
        return replace(self, **given)


VARIABLES: Final[Mapping[str, tuple[str, Callable[[str, str], Any]]]] = {
    "BALLONET_BUDGET": ("budget", parse_size),
    "BALLONET_PAGE_SIZE": ("page_size", parse_size),
    "BALLONET_HOST_BUDGET": ("host_budget", parse_host_budget),
    "BALLONET_PEER": ("peer", _parse_peer),
    "BALLONET_PEER_BUDGET": ("peer_budget", parse_size),
    "BALLONET_HOST_PAGES": ("host_pages", _parse_switch),
    "BALLONET_GRAPHS": ("graphs", _parse_switch),
    "BALLONET_SPILL": ("spill", _parse_switch),
    "BALLONET_DEVICE": ("device", _parse_device),
    "BALLONET_LIBCUDA": ("libcuda", lambda text, name: text),
    "BALLONET_LINK": ("link_bandwidth", parse_bandwidth),
    "BALLONET_LINK_LATENCY": ("link_latency", parse_time),
    "BALLONET_PEER_LINK": ("peer_bandwidth", parse_bandwidth),
    "BALLONET_CHAOS": ("chaos", _parse_seed),
    "BALLONET_RESERVE": ("reserve", parse_time),
    "BALLONET_TURN": ("turn", parse_time),
    "BALLONET_FAULT": ("faults", _parse_faults),
    "BALLONET_REPLICA_FAULTS": ("replica_faults", lambda text, name: Path(text)),
    "BALLONET_CONTROL": ("control", _parse_switch),
    "BALLONET_CACHE_DIR": ("cache_dir", lambda text, name: Path(text).expanduser()),
    "BALLONET_TRUST_FOLDER": ("trust_folders", lambda text, name: _parse_folders(text)),
}

LEDGERS: Final = Path("/tmp")  # where the ledgers of users are: nothing that a process is started with changes it


def variables(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns those of the environment's variables that are set and not empty."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in names if environ.get(name, "").strip()}


def cache_dir(config: Config, environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder for files compiled once per torch or measured once per model: `$BALLONET_CACHE_DIR`, else in
    the user's cache folder (XDG)."""
    if config.cache_dir is not None:
        return config.cache_dir
    environ = os.environ if environ is None else environ
    xdg = environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if not xdg and not os.path.isabs(home):
        return Path(tempfile.gettempdir()) / f"ballonet-{os.geteuid()}"  # a user without a home
    return (Path(xdg) if xdg else Path(home) / ".cache") / "ballonet"


def trust_folders(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Returns the folders of several users in which everything is trusted (`$BALLONET_TRUST_FOLDER`, separated as in
    PATH)."""
    return _parse_folders(variables(("BALLONET_TRUST_FOLDER",), environ).get("BALLONET_TRUST_FOLDER", ""))


def ledger_dir() -> Path:
    """Returns the folder in which processes of this user find the ledgers of the budgets that they share. It follows
    from the user alone: two processes with different ones would share nothing."""
    return LEDGERS / f"ballonet-{os.geteuid()}"


def cuda_homes(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Returns the folders of CUDA toolkits, by the variables that their own tools read."""
    environ = os.environ if environ is None else environ
    return tuple(Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name))


def control_dirs(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Returns the folders in which control sockets of this user may be, the best first: the user's runtime folder
    (XDG), else the folder for temporary files. A process that was started in another environment may have chosen
    another of them."""
    environ = os.environ if environ is None else environ
    user = os.geteuid()
    runtime = [Path(environ.get("XDG_RUNTIME_DIR", "")), Path(f"/run/user/{user}")]
    temporary = [Path(tempfile.gettempdir()), Path("/tmp")]
    chosen = [folder / "ballonet" for folder in runtime if folder.is_absolute() and folder.is_dir()]
    return tuple(dict.fromkeys(chosen + [folder / f"ballonet-{user}" for folder in temporary]))


def environment() -> dict[str, str]:
    """Returns a copy of this process's environment, for other processes."""
    return dict(os.environ)


def change_environment(values: Mapping[str, str | None]) -> None:
    """Sets variables of this process, for itself and what it starts; None: unsets one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
