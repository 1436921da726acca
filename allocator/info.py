"""The facts of `ballonet info`: the device, the versions, what works on this machine, what does not and why.

Imports neither torch nor transformers: their versions come from what is installed. The driver is asked without a
context.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from . import _native, cuda_headers, device_choice, findings, ram, versions
from .config import Config, cache_dir, environment
from .errors import BallonetError, CoreMissing, DriverUnavailable
from .torch_parts import (
    COMPANION,
    COMPILERS,
    PREBUILT,
    TORCH_ALLOCATOR,
    TorchBuild,
    TorchPart,
    compiler,
    file_name,
    installed_build,
)
from .trusted import TrustedFolder
from .units import format_size

PACKAGES: Final = ("torch", "transformers", "accelerate", "safetensors", "nvidia-ml-py")
CUDNN: Final = (
    "off from manage() to the last release(), as it compiles a plan for every new length and does not repeat itself; "
    "torch's choice with BALLONET_PIECES=none"
)
PEER: Final = "a peer for KV could be used"
HOST_PAGES: Final = "host pages at device addresses"
GRAPHS: Final = "decoding by CUDA graphs"
ATTENTION: Final = "cuDNN's attention"
NEEDED: Final = ("pages on a device", *versions.SUPPORTED)  # checks without which nothing works
CONCLUDED: Final = (*NEEDED, "CUDA", "preflight", HOST_PAGES, GRAPHS, ATTENTION)  # those that are no shortcoming, too
_ALONE: Final = "no other device can be reached: a second pool on this one, only"
_NO_NEED: Final = "not done, and not needed on a CPU: it tries the driver of a GPU"
_TO_DO: Final = "Run `ballonet preflight` once: it tries what ballonet assumes of this device and driver."
_STYLES: Final = {"yes": "green", "no": "yellow"}
Facts = dict[str, Any]


def gather(config: Config, ballonet: str) -> Facts:
    """Returns plain values, ready for JSON. `ballonet` is its own version.

    Keys: ballonet, python, versions (package → version or None), device (None where none can be used), defaults
    (page_size, host_budget and peer_budget in bytes, peer, budget where it was set), memory (bytes total and available
    of the host), checks: a list of {name, works, detail}.
    """
    target, problem = _target(config)
    return {
        "ballonet": ballonet,
        "python": sys.version.split()[0],
        "versions": {name: versions.installed(name) for name in PACKAGES},
        "device": _device(target),
        "defaults": _defaults(config, target),
        "memory": {"total": ram.total(), "available": ram.available()},
        "checks": [
            {"name": name, "works": works, "detail": detail} for name, works, detail in _checks(config, target, problem)
        ],
    }


def show(facts: Facts, *, verbose: bool = False) -> None:
    """Prints what `gather` found, for people: the machine, what is missing, and what that means. `verbose`: all checks
    and versions, too."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for rows in (_rows(facts, verbose), _marked(facts, verbose)):
        table = Table(show_header=False, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
        if table.row_count:
            console.print(table)
            console.print()
    console.print(conclusion(facts))


def _rows(facts: Facts, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yields (what, value) of the machine."""
    device, defaults, memory, told = facts["device"], facts["defaults"], facts["memory"], facts["versions"]
    yield "ballonet", f"{facts['ballonet']} on Python {facts['python']}"
    for name, version in told.items():
        if verbose or name in versions.SUPPORTED:
            yield name, version or "not installed"
    yield "device", f"{_name(device)}, {format_size(device['total_memory'])}" if device else "none"
    if device:
        if verbose or device["kind"] == "cuda":
            yield "driver", f"{device['driver']} ({device['library']})"
        yield "page size", format_size(defaults["page_size"])
        budget = defaults["budget"]
        yield "budget", format_size(budget) if budget else "chosen at install() from the free memory"
        if defaults["peer"]:
            yield "peer for KV", f"{defaults['peer']}, {format_size(defaults['peer_budget'])}"
        elif verbose:
            yield "peer for KV", f"none is used (BALLONET_PEER); there could be {_possible_peer(facts)}"
    yield "host memory", f"{format_size(memory['available'])} of {format_size(memory['total'])} available"


def _name(device: Facts) -> str:
    return str(device["name"]) if device["kind"] == "cuda" else "the CPU (host stand-in)"


def _possible_peer(facts: Facts) -> str:
    (detail,) = (check["detail"] for check in facts["checks"] if check["name"] == PEER)
    return "a second pool on this device" if detail == _ALONE else str(detail)


def _marked(facts: Facts, verbose: bool) -> Iterator[tuple[str, str, str]]:
    """Yields (yes or no, what, what that means): what is missing and not in the conclusion, or all."""
    on_cpu = facts["device"] is not None and facts["device"]["kind"] != "cuda"
    for check in facts["checks"]:
        name, works, detail = check["name"], check["works"], check["detail"]
        if name == PEER or not (verbose or (name not in CONCLUDED and not works)):
            continue  # the row of the machine says it
        if name == "preflight" and on_cpu and not works:
            yield "-", name, _NO_NEED
        else:
            yield "yes" if works else "no", name, detail


def conclusion(facts: Facts) -> str:
    """Says in sentences what works on this machine, what does not, and what is to be done."""
    checks = {check["name"]: check for check in facts["checks"]}
    wrong = [f"{name}: {checks[name]['detail']}" for name in NEEDED if not checks[name]["works"]]
    if wrong:
        return f"ballonet does not work here: {'; '.join(wrong)}."
    host = checks[HOST_PAGES]
    leaves = (
        "weights and KV that do not fit into the budget move to host memory"
        if host["works"]
        else f"but nothing can move to host memory: {host['detail']}"
    )
    if facts["device"]["kind"] != "cuda":
        cuda = checks["CUDA"]
        why = "the CPU was asked for (BALLONET_DEVICE)" if cuda["works"] else cuda["detail"]
        return f"ballonet works here, for models on the CPU; {leaves}. No GPU is used: {why}."
    graphs = checks[GRAPHS]
    decodes = "Models decode by CUDA graphs" if graphs["works"] else f"No CUDA graphs: {graphs['detail']}"
    tried = "" if checks["preflight"]["works"] else f" {_TO_DO}"
    return f"ballonet works here, for models on the GPU; {leaves}. {decodes}.{tried}"


def _target(config: Config) -> tuple[device_choice.Target | None, str]:
    try:
        return device_choice.choose(config, _torch_has_cuda()), ""
    except BallonetError as error:
        return None, str(error)


def _device(target: device_choice.Target | None) -> Facts | None:
    if target is None:
        return None
    number = target.facts["driver_version"]
    return {
        "kind": target.kind,
        "ordinal": target.ordinal,
        "name": target.facts["name"],
        "total_memory": target.facts["total_memory"],
        "driver": f"CUDA {number // 1000}.{number % 1000 // 10}" if target.kind == "cuda" else "host stand-in",
        "library": target.library,
    }


def _defaults(config: Config, target: device_choice.Target | None) -> Facts:
    if target is None:
        asked = {"peer": config.peer, "peer_budget": config.peer_budget}
        return {"page_size": None, "budget": config.budget, "host_budget": config.host_budget, **asked}
    config = findings.applied(config, target.facts)
    page = device_choice.page_size(config, target.kind)
    host = device_choice.host_budget(config, target.kind, page)
    peer = device_choice.peer_ordinal(config, target)
    return {
        "page_size": page,
        "budget": config.budget,
        "host_budget": host,
        "peer": None if peer is None else "second pool" if peer == target.ordinal else f"device {peer}",
        "peer_budget": 0 if peer is None else device_choice.peer_budget(config, target, peer, page),
    }


def _checks(config: Config, target: device_choice.Target | None, problem: str) -> Iterator[tuple[str, bool, str]]:
    """Yields (what, does it work, what that means or why not)."""
    if target is None:
        yield "pages on a device", False, problem
    else:
        where = "on the GPU" if target.kind == "cuda" else "in host memory, for models on the CPU (host stand-in)"
        yield "pages on a device", True, where
    yield "CUDA", *_cuda(config)
    if target is not None:
        yield HOST_PAGES, *_host_pages(config, target)
        if target.kind == "cuda":
            why = findings.why_no_graphs(config, target.facts)
            asked = environment().get("BALLONET_PIECES", "auto") != "none"
            yield GRAPHS, not why and asked, why or ("" if asked else "turned off (BALLONET_PIECES)")
            if not why and asked:
                yield ATTENTION, False, CUDNN
        yield "preflight", *_preflight(config, target)
        others = ", ".join(f"device {fact}" for fact in target.facts["peers"])
        yield PEER, True, others or _ALONE
        shared = target.facts["posix_handles"]
        yield "pages that other processes can open", shared, "" if shared else "the driver offers no POSIX handles"
    build = installed_build()
    yield "companion for torch", *_companion(config, build)
    if build is not None and build.cuda is not None:
        yield "torch's whole CUDA allocator", *_torch_allocator(config, build)
    for package in versions.SUPPORTED:
        yield package, *_supported(package)


def _host_pages(config: Config, target: device_choice.Target) -> tuple[bool, str]:
    if not target.facts["host_pages"]:
        return False, "the driver offers none: nothing streams or spills, and KV stays on the device"
    kept = findings.load(cache_dir(config), findings.key_of(target.facts))
    if config.host_pages is False:
        return False, "turned off (BALLONET_HOST_PAGES)"
    if config.host_budget == 0:
        return False, "turned off (BALLONET_HOST_BUDGET)"
    if config.host_pages is None and kept is not None and kept.settings.get("host_pages") is False:
        return False, kept.reasons.get("host_pages", "")
    return True, "install() tries one, which a container may refuse" if target.kind == "cuda" else ""


def _preflight(config: Config, target: device_choice.Target) -> tuple[bool, str]:
    kept = findings.load(cache_dir(config), findings.key_of(target.facts))
    if kept is None:
        return False, "not done on this device and driver: ballonet preflight"
    chosen = ", ".join(f"{name}={value}" for name, value in kept.settings.items())
    return True, f"{kept.when}: {chosen or 'nothing had to be changed'} ({kept.path})"


def _cuda(config: Config) -> tuple[bool, str]:
    library = config.libcuda or device_choice.LIBCUDA
    try:
        facts = _native.probe(library, 0)
    except CoreMissing:
        return False, "the native core asks the driver, and is missing"
    except DriverUnavailable as error:
        return False, str(error)
    if facts["kind"] == "standin":
        return False, f"{library} is the host stand-in"
    if not facts["devices"]:
        return False, f"{library} finds no device"
    if not _torch_has_cuda():
        return False, f"{facts['devices']} device(s), but the torch that is installed is a CPU build"
    return True, f"{facts['devices']} device(s)"


def _companion(config: Config, build: TorchBuild | None) -> tuple[bool, str]:
    works, detail = _torch_part(COMPANION, config, build, "")
    lost = (
        "activations on the CPU stay outside the pool; on a GPU running out of memory is a RuntimeError, not "
        "torch.OutOfMemoryError"
    )
    return works, detail if works else f"{detail}: {lost}"


def _torch_allocator(config: Config, build: TorchBuild) -> tuple[bool, str]:
    _, missing = cuda_headers.find(str(build.cuda))
    works, detail = _torch_part(TORCH_ALLOCATOR, config, build, missing)
    return works, detail if works else f"{detail}. So {cuda_headers.WITHOUT}"


def _torch_part(part: TorchPart, config: Config, build: TorchBuild | None, missing: str) -> tuple[bool, str]:
    """Returns whether `install()` has it, and where from or why not. `missing`: what it takes to compile it."""
    if build is None:
        return False, "torch is not installed"
    name = file_name(part, build)
    if (PREBUILT / name).exists():
        return True, f"came with ballonet, for torch {build.release}"
    with suppress(OSError):  # none, or not trusted
        folder = TrustedFolder(cache_dir(config), make=False)
        os.close(folder.open(name))
        return True, f"compiled before, for torch {build.version}: {folder.path / name}"
    why = f"none came with ballonet for torch {build.version}"
    if compiler() is None:
        return False, f"{why}, and to compile it none of {', '.join(COMPILERS)} is in PATH"
    if missing:
        return False, f"{why}, and to compile it {missing}"
    return True, f"{why}: install() compiles it with {compiler()}, into {cache_dir(config)}"


def _supported(package: str) -> tuple[bool, str]:
    version = versions.installed(package)
    if version is None:
        return False, "not installed"
    old = versions.too_old(package, version)
    why = old or versions.untested(package, version)
    return not old, f"{version} is installed" + (f"; {why}" if old else f", {why}" if why else "")


def _torch_has_cuda() -> bool:
    build = installed_build()
    return build is not None and build.cuda is not None
