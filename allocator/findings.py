"""The settings that `ballonet preflight` chose for a machine: a small JSON file that `install()` reads.

There is one file per device and driver, in the cache folder. A setting given by hand, as an argument or in the
environment, comes first; for another device or another driver the file is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .config import Config, cache_dir
from .errors import NotTrusted
from .trusted import TrustedFolder, tell

FORMAT: Final = 1  # of the file
SETTINGS: Final[Mapping[str, type]] = {"host_pages": bool, "page_size": int, "graphs": bool}  # of Config, to choose
_NVIDIA: Final = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a preflight. `settings`: values for fields of `Config`; `reasons`: why each; `when`: ISO date and
    time; `path`: the file."""

    settings: Mapping[str, Any]
    reasons: Mapping[str, str]
    when: str
    path: Path


def key_of(facts: Mapping[str, Any], nvidia: Path = _NVIDIA) -> dict[str, str]:
    """Returns the key of a file: the device and its driver, from the facts of `_native.probe`."""
    try:
        match = re.search(r"\b\d{3,}\.[\d.]+", nvidia.read_text())
    except OSError:
        match = None
    return {
        "device": str(facts.get("name", "")),
        "memory": str(facts.get("total_memory", "")),
        "driver": f"CUDA {facts['driver_version']}{f', {match[0]}' if match and facts['kind'] == 'cuda' else ''}",
    }


def path_of(folder: Path, key: Mapping[str, str]) -> Path:
    """Returns the file of a device and driver in the cache folder."""
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"preflight-{name}.json"


def save(folder: Path, key: Mapping[str, str], result: Mapping[str, Any]) -> Path:
    """Writes a preflight's result, which has `settings`, `reasons` and `when`, at once or not at all. OSError."""
    path = path_of(folder, key)
    text = json.dumps({"format": FORMAT, "key": dict(key), **result}, indent=1) + "\n"
    TrustedFolder(folder).write(path.name, text.encode())
    return path


def load(folder: Path, key: Mapping[str, str]) -> Findings | None:
    """Reads the findings for this device under this driver; None where there are none, or the file is not whole or not
    trusted."""
    path = path_of(folder, key)
    try:
        content = json.loads(TrustedFolder(folder, make=False).read(path.name))
        settings, reasons = content["settings"], content["reasons"]
        whole = content["format"] == FORMAT and content["key"] == key and set(settings) <= set(SETTINGS)
        whole = whole and all(type(value) is SETTINGS[name] for name, value in settings.items())
        return Findings(settings, reasons, content["when"], path) if whole else None
    except NotTrusted as error:
        tell(str(error))
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def applied(config: Config, facts: Mapping[str, Any]) -> Config:
    """Returns the settings, with those that a preflight chose for this device where none was given."""
    findings = load(cache_dir(config), key_of(facts))
    chosen = {} if findings is None else findings.settings
    return replace(config, **{name: value for name, value in chosen.items() if getattr(config, name) is None})


def why_no_graphs(config: Config, facts: Mapping[str, Any]) -> str:
    """Returns why models may not decode by CUDA graphs on this device; empty where they may."""
    if config.graphs is not None:
        return "" if config.graphs else "turned off (BALLONET_GRAPHS)"
    findings = load(cache_dir(config), key_of(facts))
    if findings is None or findings.settings.get("graphs") is not False:
        return ""
    return f"a preflight found graphs wrong: {findings.reasons.get('graphs', '')}"
