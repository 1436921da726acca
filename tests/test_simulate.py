"""`python -m ballonet simulate`: what a placement costs; and what it and `prefix-sim` say to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.__main__ import main
from ballonet.offload.policy import prefix_sim
from ballonet.offload.policy.schedule import evenly, one_slot, two_slots
from ballonet.offload.policy.whatif import facts
from ballonet.offload.timeline import curve


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_evenly_spaced_layers(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--layers", "40", "--ratio", "8", "--streamed", "5")
    assert found == {
        "time_in_layers": 40,
        "closed_form": 40,
        "stall": 0,
        "layers": 40,
        "ratio": 8,
        "streamed": [0, 8, 16, 24, 32],
        "slots": 2,
        "freed": 3,
        "link_busy": 1,
        "time_with_fixed_slots": 41,
    }


def test_any_placement(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--layers", "40", "--ratio", "8", "--at", "0,1,2,31", "--slots", "1")
    assert found["streamed"] == [0, 1, 2, 31]
    assert found["closed_form"] is None
    assert found["time_in_layers"] == 9 + 9 + 29 + 9
    assert found["stall"] == 16


@given(st.integers(1, 30), st.data())
def test_facts_fit_together(layers: int, data: st.DataObject) -> None:
    streamed, slots = data.draw(st.integers(0, layers)), data.draw(st.integers(1, 4))
    ratio = Fraction(data.draw(st.integers(1, 60)), data.draw(st.integers(1, 4)))
    at = evenly(layers, streamed)
    found = facts(layers, ratio, at, slots)
    formula = one_slot(layers, at, ratio) if slots == 1 else two_slots(layers, streamed, ratio)
    assert found["closed_form"] in (float(formula), None)
    if found["closed_form"] is not None:
        assert found["time_in_layers"] == found["closed_form"]
    else:
        assert ratio.denominator > 1
        assert found["time_in_layers"] > formula
    assert found["time_with_fixed_slots"] >= found["time_in_layers"] == pytest.approx(layers + found["stall"])
    assert found["link_busy"] == pytest.approx(float(streamed * ratio) / found["time_in_layers"])
    assert found["freed"] == max(0, streamed - slots)
    json.dumps(found)


EVEN = {"--layers": "4", "--ratio": "2", "--streamed": "2"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(
            (["simulate", *(f"{name}={value}" for name, value in (EVEN | changes).items() if value is not None)], says)
            for changes, says in (
                ({"--layers": "0"}, "--layers: '0' is not a whole number from 1 to 1000"),
                ({"--layers": "4.5"}, "--layers: '4.5' is not a whole number"),
                ({"--streamed": "5"}, "5 of 4 layers cannot be streamed"),
                ({"--slots": "0"}, "--slots: '0' is not a whole number from 1 to 64"),
                ({"--ratio": "nan"}, "--ratio: 'nan' is not a number above 0"),
                ({"--ratio": "1e-999999999"}, "--ratio: '1e-999999999' is not a number above 0"),
                ({"--ratio": "eight"}, "--ratio: 'eight' is not a number"),
                ({"--at": "1"}, "not allowed with argument"),
                ({"--streamed": None}, "one of the arguments --streamed --at is required"),
                ({"--streamed": None, "--at": "1,,2"}, "--at: '1,,2' is not a list of layers such as 0,1,2,31"),
                ({"--streamed": None, "--at": "1,4"}, "streamed layers are distinct, ascending and below 4, not"),
            )
        ),
        (["prefix-sim", "t", "--blocks", "0"], "--blocks: '0' is not a whole number from 1"),
        (["prefix-sim", "t", "--blocks", "1.5"], "--blocks: '1.5' is not a whole number"),
        (["prefix-sim", "t"], "the following arguments are required: --blocks"),
        (["prefix-sim", "t", "--blocks", "5", "--policy", "best"], "--policy: invalid choice: 'best'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_exit_code_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith(f"usage: python -m ballonet {arguments[0]}")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("simulate", (*facts(4, Fraction(2), (1,), 1), "--layers", "--at")),
        ("prefix-sim", (*prefix_sim.facts([[1]], 1, "lru"), *prefix_sim.POLICIES, *curve.SUFFIXES)),
    ],
)
def test_help_explains(command: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert [word for word in words if word not in out] == []


def test_no_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"hash_ids": [1]}\n')
    code = (
        "import sys; from ballonet.__main__ import main; "
        "main(['simulate', '--layers', '40', '--ratio', '8', '--streamed', '5']); "
        f"main(['prefix-sim', {str(tmp_path / 'trace')!r}, '--blocks', '5']); "
        "sys.exit(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    simulated, replayed = map(json.loads, done.stdout.splitlines())
    assert (simulated["time_in_layers"], replayed["requests"]) == (40, 1)
