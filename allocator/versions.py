"""The versions of torch and transformers that ballonet works with, from the oldest supported to the newest tested."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple

from .errors import UnsupportedVersion
from .notices import warn

Release = tuple[int, int]


class Releases(NamedTuple):
    """From the oldest release that is supported to the newest that was tested."""

    oldest: Release
    newest: Release


SUPPORTED: Final = {  # pyproject.toml has the same bounds
    "torch": Releases((2, 11), (2, 15)),
    "transformers": Releases((5, 23), (5, 24)),
}
# The releases of torch within these bounds: a wheel brings what links torch for each (`make wheel`).
TORCH_RELEASES: Final = ("2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")

_told: Final[set[str]] = set()


def installed(package: str) -> str | None:
    """Returns the version of a package, without importing it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(version: str) -> Release:
    """Returns the first two numbers of a version; zeros where it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))


def too_old(package: str, version: str) -> str:
    """Returns what to do where this version is older than supported, empty where it is not."""
    oldest = SUPPORTED[package].oldest
    return "" if release(version) >= oldest else f"{_text(oldest)} or newer is needed"


def untested(package: str, version: str) -> str:
    """Returns that this version is newer than the newest tested, empty where it is not."""
    newest = SUPPORTED[package].newest
    return "" if release(version) <= newest else f"newer than {_text(newest)}, the newest that ballonet was tested with"


def require(package: str, version: str) -> None:
    """Raises UnsupportedVersion where this version is older than supported."""
    if why := too_old(package, version):
        raise UnsupportedVersion(f"{package} {version} is not supported: {why}. pip install --upgrade ballonet")


def warn_of_untested() -> None:
    """Warns of each package that is newer than tested, once in a process."""
    for package in SUPPORTED:
        present = installed(package)
        if present is not None and (why := untested(package, present)) and package not in _told:
            _told.add(package)
            text = f"{package} {present} is {why}: what it changed may silently leave out parts of ballonet"
            warn(text)


def _text(release: Release) -> str:
    return ".".join(map(str, release))
