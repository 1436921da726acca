"""The options of `manage()`, each in its four ways: two keywords, a flag and a variable; what is refused, and how."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ballonet
from ballonet.__main__ import main
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.config import API_KEY, VARIABLES
from ballonet.allocator.errors import AlreadyManaged, ConfigError, ManageError, OptionError
from ballonet.hooks import loading, manage
from ballonet.hooks.options import OPTIONS, ManageOptions, Option, given
from ballonet.hooks.programs import run

from .models import build
from .pool import installing

SETTINGS = (Path(__file__).parent.parent / "docs" / "settings.md").read_text()
EXAMPLES: Mapping[str, tuple[object, str, object]] = {  # a keyword's value, the same as a text, and what both mean
    "interval": (2, "2", 2),
    "tpot_slo": ("80ms", "80ms", 0.08),
    "ttft_slo": (2, "2s", 2.0),
    "priority": (-3, "-3", -3),
    "floor": ("2MiB", "2MiB", 2**21),
    "prefix_cache": (True, "1", True),
    "prefix_dir": ("/var/prefixes", "/var/prefixes", Path("/var/prefixes")),
    "prefix_dir_limit": (2**20, "1MiB", 2**20),
    "shared_budget": ("2MiB", "2MiB", 2**21),
    "batches": ("full", "full", "full"),
    "pieces": (None, "none", None),
}
WRONG: Mapping[str, tuple[str, str]] = {  # a text, and what is said of it, and what to do
    "interval": ("often", "a whole number from 1"),
    "tpot_slo": ("soon", "is no time: write seconds"),
    "ttft_slo": ("0", "nothing takes no time; give seconds"),
    "priority": ("high", "models with the lowest give pages first"),
    "floor": ("-1", "is no size: write a positive number of bytes"),
    "prefix_cache": ("much", "is no size: write"),
    "prefix_dir_limit": ("0", "is no size: write"),
    "shared_budget": ("all", "is no size: write"),
    "batches": ("big", 'give "fast"'),
    "pieces": ("some", 'give "auto"'),
}


class Seen(Exception):
    """Ends what would manage a model. `options`: with which."""

    def __init__(self, model: object, options: ManageOptions, **_: object) -> None:
        self.options = options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    return path


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(2**25, 65536) as put:
        yield put()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that `run` would run; nothing is installed, and its folder is on the path for this test only."""
    monkeypatch.setattr(install, "install", lambda **_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "program.py"
    path.touch()
    return path


def seen(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> ManageOptions:
    """What a model would have been managed with."""

    def see(*args: Any, **keywords: Any) -> None:
        raise Seen(*args, **keywords)

    monkeypatch.setattr(manage, "managed", see)
    monkeypatch.setattr(loading, "managed", see)
    monkeypatch.setattr(run, "run", lambda program, args, options, **_: see(program, options))
    with pytest.raises(Seen) as caught:
        act()
    return caught.value.options


def with_flags(program: Path, *flags: str) -> Callable[[], object]:
    return partial(main, ["run", *flags, str(program), "--prefix-cache", "--interval", "of the program"])


def by_name(option: Option) -> str:
    return option.name


@pytest.mark.parametrize("option", OPTIONS, ids=by_name)
def test_each_option_in_each_of_four_ways(
    option: Option, device: Device, folder: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, text, means = EXAMPLES[option.name]
    wanted = replace(ManageOptions(), **{option.name: means})
    keyword: dict[str, Any] = {option.name: value}
    flag = [f"{option.flag}={text}"]
    assert seen(lambda: ballonet.manage(nn.Linear(2, 2), **keyword), monkeypatch) == wanted
    assert seen(lambda: ballonet.from_pretrained(folder, **keyword), monkeypatch) == wanted
    assert seen(with_flags(program, *([option.flag] if option.switch else flag)), monkeypatch) == wanted
    monkeypatch.setenv(option.variable, text)
    assert seen(lambda: ballonet.manage(nn.Linear(2, 2)), monkeypatch) == wanted
    assert seen(lambda: ballonet.from_pretrained(folder), monkeypatch) == wanted
    assert seen(with_flags(program), monkeypatch) == wanted


def test_a_model_is_managed_with_them(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLONET_PRIORITY", "2")
    monkeypatch.setenv("BALLONET_PREFIX_DIR_LIMIT", "1MiB")
    model = build("llama")
    with ballonet.manage(model, floor="1MiB", prefix_dir=tmp_path) as handle:
        assert handle.prefixes is not None
        wanted = ManageOptions(priority=2, floor=2**20, prefix_dir=tmp_path, prefix_dir_limit=2**20)
        assert handle.report().options == wanted
        assert ballonet.manage(model, floor=2**20) is ballonet.manage(model) is handle
        for other in ({"floor": 2**21}, {"priority": 3}, {"interval": None}, {"prefix_dir_limit": 2**21}):
            with pytest.raises(AlreadyManaged):
                ballonet.manage(model, **other)


def test_a_keyword_or_a_flag_wins_over_the_environment(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, EXAMPLES[option.name][1])
    monkeypatch.delenv("BALLONET_INTERVAL")
    explicit = seen(lambda: ballonet.manage(nn.Linear(2, 2), tpot_slo=1, floor="1KiB", prefix_cache=False), monkeypatch)
    assert (explicit.tpot_slo, explicit.floor, explicit.kept_prefixes) == (1.0, 1024, False)
    assert (explicit.ttft_slo, explicit.priority) == (2.0, -3)
    flags = seen(with_flags(program, "--priority", "0", "--prefix-cache-size", "8GiB"), monkeypatch)
    assert (flags.priority, flags.prefix_cache, flags.floor) == (0, 2**33, 2**21), "also where it is the default"


@pytest.mark.parametrize("option", [entry for entry in OPTIONS if entry.name in WRONG], ids=by_name)
def test_wrong_option_is_named_as_it_was_given(
    option: Option, program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, says = WRONG[option.name]
    for call in (ballonet.manage, partial(ballonet.from_pretrained, "nowhere")):
        with pytest.raises(OptionError, match=f"^{option.name} is '{text}'.*{says}") as caught:
            call(*([nn.Linear(2, 2)] if call is ballonet.manage else []), **{option.name: text})
        assert isinstance(caught.value, ManageError)
        assert isinstance(caught.value, ConfigError)
    flag = f"{option.flag}-size" if option.switch else option.flag
    with pytest.raises(SystemExit, match="2"):
        main(["run", f"{flag}={text}", str(program)])
    assert re.search(rf"{option.flag} is '{text}'.*{says}", capsys.readouterr().err)
    monkeypatch.setenv(option.variable, text)
    with pytest.raises(OptionError, match=f"^{option.variable} is '{text}'.*{says}"):
        ballonet.manage(nn.Linear(2, 2))
    assert main(["run", str(program)]) == 2
    assert re.match(rf"ballonet: {option.variable} is '{text}'.*{says}", capsys.readouterr().err)


def test_an_interval_and_an_slo_are_refused_from_wherever_they_come(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BALLONET_TTFT_SLO", "2s")
    with pytest.raises(OptionError, match=r'interval is 2.*give "auto", or no SLO .*BALLONET_TTFT_SLO'):
        ballonet.manage(build("llama"), interval=2)
    assert main(["run", "--interval", "none", str(program)]) == 2
    assert "interval is None, which leaves no choice" in capsys.readouterr().err


def test_the_table_is_what_people_see() -> None:
    """The keywords with their defaults, the flags, and docs/settings.md's table of variables."""
    names = [option.name for option in OPTIONS]
    for function in (ballonet.manage, ballonet.from_pretrained):
        shown = inspect.signature(function).parameters
        assert [name for name in shown if name in names] == names
        assert "chaos" not in shown
        assert given({name: shown[name].default for name in names}) == {}, "its default is the table's"
    assert [field.name for field in fields(ManageOptions)] == names == list(EXAMPLES)
    documented = set(re.findall(r"^\| `(BALLONET_\w+)` \|", SETTINGS, re.MULTILINE))
    assert documented == {API_KEY, *VARIABLES, *(option.variable for option in OPTIONS)}
    with pytest.raises(FrozenInstanceError):
        ManageOptions().interval = 3  # type: ignore[misc]
