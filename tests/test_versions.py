"""The versions of torch and transformers: which are refused, which are warned of, and that one place decides."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import devices, versions
from ballonet.allocator.errors import UnsupportedVersion

ROOT = Path(__file__).parents[1]
BUDGET = 2**25


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The versions that are installed, by package: those given here, else the real ones."""
    given: dict[str, str] = {}
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda package: given.get(package) or real(package))
    monkeypatch.setattr(versions, "_told", set())
    yield given
    ballonet.restore()


@pytest.mark.parametrize(
    ("package", "fit", "old"),
    [
        ("transformers", ("5.23.0", "5.24.1", "5.25.0.dev0", "6.0"), ("4.57.1", "5.22.9", "5.6.0.dev0", "unknown")),
        ("torch", ("2.11.0", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.1"), ("2.10.1+cu128", "1.13", "unknown")),
    ],
)
def test_only_versions_that_are_too_old_are_refused(package: str, fit: tuple[str, ...], old: tuple[str, ...]) -> None:
    for version in fit:
        versions.require(package, version)
    oldest = ".".join(map(str, versions.SUPPORTED[package].oldest))
    for version in old:
        with pytest.raises(UnsupportedVersion, match=f"{re.escape(version)} .*{re.escape(oldest)} or newer"):
            versions.require(package, version)


def test_install_warns_once_of_a_version_newer_than_tested(pretended: dict[str, str]) -> None:
    pretended["transformers"] = "99.1.0"
    with pytest.warns(RuntimeWarning, match=r"transformers 99\.1\.0 is newer than") as warned:
        ballonet.install(BUDGET, device="cpu")
    assert [warning.filename for warning in warned] == [__file__]
    ballonet.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ballonet.install(BUDGET, device="cpu")


def test_install_warns_of_no_version_that_was_tested(pretended: dict[str, str]) -> None:
    pretended |= {name: ".".join(map(str, span.newest)) + ".9" for name, span in versions.SUPPORTED.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ballonet.install(BUDGET, device="cpu")
    assert devices.current() is not None


@pytest.mark.parametrize(
    ("version", "works", "says"),
    [("99.1.0", True, "newer than .*, the newest that ballonet was tested with"), ("0.9", False, "or newer is needed")],
)
def test_info_says_which_version_is_not_supported(
    pretended: dict[str, str], capsys: pytest.CaptureFixture[str], version: str, works: bool, says: str
) -> None:
    for package in versions.SUPPORTED:
        pretended[package] = version
        main(["info", "--json"])
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert facts["versions"][package] == version
        (check,) = (check for check in facts["checks"] if check["name"] == package)
        assert check["works"] is works
        assert re.search(says, check["detail"])
        main(["info"])
        assert re.search(says, " ".join(capsys.readouterr().out.split()))


def test_a_wheel_is_for_every_release_of_torch_within_the_bounds() -> None:
    (major, oldest), (_, newest) = versions.SUPPORTED["torch"]
    minors = {name.rpartition(".")[0] for name in versions.TORCH_RELEASES}
    assert minors == {f"{major}.{minor}" for minor in range(oldest, newest + 1)}


def test_the_package_the_pins_and_the_commands_name_the_same_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for package, (oldest, newest) in versions.SUPPORTED.items():
        bounds = f"{package}>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
        assert bounds in project["dependencies"]
        assert oldest <= versions.release(pins[package]) <= newest
    assert versions.release(pins["transformers"]) == versions.SUPPORTED["transformers"].newest
    (older,) = re.findall(r"^OLDER := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert versions.release(older) == versions.SUPPORTED["transformers"].oldest
