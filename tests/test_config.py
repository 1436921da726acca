"""Settings: what is understood, what is refused and how, and which source wins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ballonet.allocator.config import (
    VARIABLES,
    Config,
    cache_dir,
    format_size,
    ledger_dir,
    parse_bandwidth,
    parse_host_budget,
    parse_size,
    parse_time,
)
from ballonet.allocator.errors import BallonetError, ConfigError
from ballonet.allocator.units import format_time


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("4096", 4096),
        (4096, 4096),
        ("2M", 2 * 2**20),
        (" 64 kib ", 65536),
        ("10KB", 10_000),
        ("1TiB", 2**40),
        (".5MiB", 2**19),
        ("7b", 7),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


NO_SIZES = (
    *("", " ", "0", "-1", "0.4", "1e9", "nan", "inf", "GiB", "1,5GB", "24 GiBs", "٣MiB"),
    *(0, -1, 1.5, True, None, b"4096", []),
)


@pytest.mark.parametrize("text", NO_SIZES)
def test_text_that_is_no_size_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ConfigError, match=r"budget is .*24GiB") as caught:
        parse_size(text, "budget")  # type: ignore[arg-type]
    assert isinstance(caught.value, BallonetError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", [0, "0", "0GiB", " 0 "])
def test_no_host_pages(text: int | str) -> None:
    assert parse_host_budget(text) == 0
    assert Config().merge(host_budget=text).host_budget == 0
    assert Config.from_env({"BALLONET_HOST_BUDGET": str(text)}).host_budget == 0
    assert parse_host_budget("1MiB") == 2**20


@pytest.mark.parametrize("text", ["", "-1", False, 0.5, None])
def test_text_that_is_no_host_budget_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="host_budget is"):
        parse_host_budget(text)  # type: ignore[arg-type]


@given(st.integers(1, 2**50))
@example(1070)
def test_a_size_for_people_reads_back_to_two_digits(nbytes: int) -> None:
    """To half of the last digit, and the byte that a size is rounded down by."""
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= 0.005 * nbytes + 1


@given(st.floats(1e-9, 1e5))
def test_a_time_for_people_is_never_too_short(seconds: float) -> None:
    assert seconds <= parse_time(format_time(seconds)) * (1 + 1e-9) <= seconds * 1.0011
    assert [format_time(time) for time in (0.0, 0.07, 4.0, 90)] == ["0 ms", "70 ms", "4000 ms", "90 s"]


@given(st.integers(1, 1000), st.sampled_from([("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)]))
def test_whole_units_read_back_exactly(count: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{count}{unit[0]}") == count * unit[1]
    assert parse_size(format_size(count * unit[1])) == count * unit[1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("80ms", 0.08), ("250us", 250e-6), ("2s", 2.0), ("15ns", 15e-9), (3, 3.0), ("0", 0.0), ("1min", 60.0)],
)
def test_times(text: float | str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "-1s", -1, "5 parsecs", float("nan"), float("inf"), None, True])
def test_text_that_is_no_time_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"tpot is .*80ms"):
        parse_time(text, "tpot")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rate"), [("8GB/s", 8 * 10**9), ("500 MiB/s", 500 * 2**20), ("8GB", 8 * 10**9), (7, 7)]
)
def test_bandwidths(text: int | str, rate: int) -> None:
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["", "/s", "8GB/min", "fast", "0GB/s", None])
def test_text_that_is_no_bandwidth_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"link is .*8GB/s"):
        parse_bandwidth(text, "link")  # type: ignore[arg-type]


VALUES = {  # variable -> a text, and the field that it sets to what
    "BALLONET_BUDGET": ("1GiB", "budget", 2**30),
    "BALLONET_PAGE_SIZE": ("64KiB", "page_size", 65536),
    "BALLONET_HOST_BUDGET": ("2GiB", "host_budget", 2**31),
    "BALLONET_PEER": ("CUDA:2", "peer", "cuda:2"),
    "BALLONET_PEER_BUDGET": ("1GB", "peer_budget", 10**9),
    "BALLONET_PEER_LINK": ("9GB/s", "peer_bandwidth", 9 * 10**9),
    "BALLONET_HOST_PAGES": ("0", "host_pages", False),
    "BALLONET_GRAPHS": ("0", "graphs", False),
    "BALLONET_SPILL": ("off", "spill", False),
    "BALLONET_DEVICE": ("CUDA:1", "device", "cuda:1"),
    "BALLONET_LIBCUDA": ("/opt/libcuda.so", "libcuda", "/opt/libcuda.so"),
    "BALLONET_LINK": ("8GB/s", "link_bandwidth", 8 * 10**9),
    "BALLONET_LINK_LATENCY": ("1ms", "link_latency", 1e-3),
    "BALLONET_CHAOS": ("7", "chaos", 7),
    "BALLONET_RESERVE": ("2min", "reserve", 120.0),
    "BALLONET_TURN": ("1500ms", "turn", 1.5),
    "BALLONET_REPLICA_FAULTS": ("/tmp/faults", "replica_faults", Path("/tmp/faults")),
    "BALLONET_FAULT": ("cuMemMap:7, cuMemCreate:1", "faults", (("cuMemMap", 7), ("cuMemCreate", 1))),
    "BALLONET_CONTROL": ("off", "control", False),
    "BALLONET_CACHE_DIR": ("/var/cache/b", "cache_dir", Path("/var/cache/b")),
    "BALLONET_TRUST_FOLDER": ("/var/a:/var/b/", "trust_folders", (Path("/var/a"), Path("/var/b"))),
}


def test_every_variable_is_read() -> None:
    config = Config.from_env({variable: text for variable, (text, _, _) in VALUES.items()})
    assert config == Config(**{field: value for _, field, value in VALUES.values()})  # type: ignore[arg-type]
    assert all(getattr(config, field) != getattr(Config(), field) for field, _ in VARIABLES.values())


def test_unset_and_empty_variables_leave_the_defaults() -> None:
    assert Config.from_env({}) == Config.from_env(dict.fromkeys(VARIABLES, " ")) == Config()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BALLONET_BUDGET", "much"),
        ("BALLONET_PAGE_SIZE", "-2MiB"),
        ("BALLONET_HOST_BUDGET", "1 2"),
        ("BALLONET_PEER", "cuda"),
        ("BALLONET_PEER_BUDGET", "0"),
        ("BALLONET_DEVICE", "tpu"),
        ("BALLONET_DEVICE", "cuda:-1"),
        ("BALLONET_LINK", "8GHz"),
        ("BALLONET_LINK_LATENCY", "soon"),
        ("BALLONET_CHAOS", "yes"),
        ("BALLONET_CHAOS", "-1"),
        ("BALLONET_RESERVE", "long"),
        ("BALLONET_CONTROL", "2"),
        ("BALLONET_FAULT", "cuMemMap"),
        ("BALLONET_FAULT", "cuMemMap:0"),
        ("BALLONET_FAULT", "malloc:1"),
        ("BALLONET_FAULT", "cuMemMap:1;cuMemMap:2"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        Config.from_env({variable: text})


def test_arguments_win_over_variables() -> None:
    config = Config.from_env({"BALLONET_BUDGET": "1GiB", "BALLONET_PAGE_SIZE": "64KiB"})
    merged = config.merge(budget="2GiB", host_budget=4096, device="cpu")
    assert (merged.budget, merged.page_size, merged.host_budget, merged.device) == (2**31, 65536, 4096, "cpu")
    assert config.merge() == config
    with pytest.raises(ConfigError, match="page_size"):
        config.merge(page_size="large")


def test_the_cache_folder() -> None:
    assert cache_dir(Config(cache_dir=Path("/c"))) == Path("/c")
    assert cache_dir(Config(), {"XDG_CACHE_HOME": "/x"}) == Path("/x/ballonet")
    assert cache_dir(Config(), {}) == Path.home() / ".cache" / "ballonet"


def test_the_cache_folder_of_a_user_without_a_home_is_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_dir(Config(), {}) == Path(tempfile.gettempdir()) / f"ballonet-{os.geteuid()}"


def test_the_folder_of_ledgers_follows_from_the_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = ledger_dir()
    for name in ("TMPDIR", "XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert tempfile.gettempdir() == str(tmp_path)
    assert ledger_dir() == folder
    assert folder.name == f"ballonet-{os.geteuid()}"
