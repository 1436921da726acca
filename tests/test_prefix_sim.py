"""`python -m ballonet prefix-sim`: recorded requests through the index of the prefix cache."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ballonet.__main__ import main
from ballonet.allocator.errors import ConfigError
from ballonet.offload.policy import prefix_sim
from ballonet.offload.record.prefix_trace import read
from ballonet.offload.timeline import curve

MOONCAKE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "mooncake_conversation_trace.jsonl"


def conversations(seed: int, requests: int = 800) -> list[list[int]]:
    """As Mooncake's: one system prompt; a request goes on where an earlier one ended, before its last block, which was
    not full, and adds some; most conversations end soon."""
    chance = random.Random(seed)
    fresh = iter(range(1, 10**6))
    trace: list[list[int]] = []
    for _ in range(requests):
        earlier = chance.choice(trace[-60:])[:-1] if trace and chance.random() < 0.55 else [0]
        trace.append([*earlier, *(next(fresh) for _ in range(chance.randint(1, 12)))])
    return trace


def written(folder: Path, trace: list[list[int]]) -> Path:
    path = folder / "trace.jsonl"
    lines = [{"timestamp": n, "input_length": 512 * len(keys), "hash_ids": keys} for n, keys in enumerate(trace)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def counted(trace: list[list[int]], room: int | None) -> int:
    """Blocks found by a cache of the least recently used, any number where `room` is None, by looking at everything. Of
    a request the last block goes first."""
    used: dict[int, tuple[int, int]] = {}
    found = 0
    for now, keys in enumerate(trace):
        hit = next((n for n, key in enumerate(keys) if key not in used), len(keys))
        found += hit
        used |= {key: (now, -depth) for depth, key in enumerate(keys)}
        while room is not None and len(used) > room:
            del used[min(used, key=lambda key: used[key])]
    return found


def simulated(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    assert main(["prefix-sim", str(path), *arguments]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_trace_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = conversations(0)
    found = simulated(capsys, written(tmp_path, trace), "--blocks", "150")
    blocks = sum(map(len, trace))
    assert found == {
        "requests": 800,
        "hit_blocks": found["hit_blocks"],
        "blocks": blocks,
        "hit_rate": found["hit_blocks"] / blocks,
        "capacity": 150,
        "policy": "odds",
        "distinct_blocks": len({key for keys in trace for key in keys}),
        "infinite_hit_rate": counted(trace, None) / blocks,
    }
    assert counted(trace, 150) < found["hit_blocks"] < counted(trace, None), "more than the least recently used"


@pytest.mark.parametrize("room", [1, 30, 200])
def test_least_recently_used_against_looking_at_everything(room: int) -> None:
    trace = [*conversations(1, 250), []]
    assert prefix_sim.facts(trace, room, "lru")["hit_blocks"] == counted(trace, room)
    assert prefix_sim.facts([[]], 1, "lru")["hit_rate"] == 0.0


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"{MOONCAKE} is not here: the recorded requests of Mooncake")
def test_the_recorded_requests_of_mooncake(capsys: pytest.CaptureFixture[str]) -> None:
    """Within a point of a cache that evicts nothing, where least recently used is not."""
    found = simulated(capsys, MOONCAKE, "--blocks", "50000")
    assert (found["requests"], found["blocks"], found["distinct_blocks"]) == (12031, 288500, 182790)
    assert round(found["infinite_hit_rate"], 4) == 0.3664
    assert found["hit_rate"] >= 0.3664 - 0.01
    assert round(prefix_sim.hits(read(MOONCAKE), 50000, "lru").hit_rate, 4) == 0.3546


def test_a_curve_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    path = written(tmp_path, conversations(0, 60))
    simulated(capsys, path, "--blocks", "100", "--curve", str(tmp_path / "curve.svg"))
    drawn = (tmp_path / "curve.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "</svg>" in drawn
    curve.draw(tmp_path / "curve.PNG", [1, 10], {"lru": [0.1, 0.2]}, 10, 0.3)
    assert (tmp_path / "curve.PNG").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.png cannot be written"):
        curve.draw(tmp_path / "folder.png", [1, 10], {"lru": [0.1, 0.2]}, 10, 0.3)


def test_numbers_of_a_curve() -> None:
    trace = conversations(0, 100)
    told: list[str] = []
    sizes, rates = prefix_sim.curve(trace, 77, told.append)
    assert sizes == sorted({*sizes, 77})
    assert sizes[-1] == len({key for keys in trace for key in keys})
    assert set(rates) == set(prefix_sim.POLICIES)
    assert len(told) == prefix_sim.steps_of_curve(trace, 77) == sum(map(len, rates.values()))
    for policy, found in rates.items():
        assert found == [prefix_sim.hits(trace, size, policy).hit_rate for size in sizes]


def test_a_curve_that_cannot_be_drawn_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = "drawing a curve needs matplotlib: pip install 'ballonet[demo]'"
    for name, says, finds in (
        ("c.svg", needs, lambda name: None),
        ("c.gif", "none of the suffixes of a picture: .svg, .png", curve.find_spec),
        ("no/c.svg", "there is no such folder", curve.find_spec),
    ):
        monkeypatch.setattr(curve, "find_spec", finds)
        assert main(["prefix-sim", "nowhere.jsonl", "--blocks", "5", "--curve", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"hash_ids": [1]}\n{"hash_ids": [1,\n', ":2: not JSON in UTF-8: "),
        (b'\n\n{"hash_ids": 3}\n', ':3: not an object with "hash_ids", a list of whole numbers'),
        (b"[1, 2]\n", ":1: not an object"),
        (b'{"ids": [1]}\n', ":1: not an object"),
        (b'{"hash_ids": [1, 2.5]}\n', ":1: not an object"),
        (b'{"hash_ids": [true]}\n', ":1: not an object"),
        (b'{"hash_ids": [1], "x": "\xff"}\n', ":1: not JSON in UTF-8"),
        (b"[" * 100_000 + b"\n", ":1: not JSON in UTF-8"),
        (b'{"hash_ids": [' + b"9" * 5000 + b"]}\n", ":1: not JSON in UTF-8"),
        (b"\n \n", ": has no requests"),
        (None, ": cannot be read: No such file or directory"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_trace_is_exit_code_2_and_names_the_line(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["prefix-sim", str(path), "--blocks", "5"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"ballonet: {path}{says}")
