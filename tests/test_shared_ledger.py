"""The ledger of a shared budget: who is gone, who may grow, what is damaged, and who holds its lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ballonet.allocator.errors import LedgerDamaged, SharedBudgetError
from ballonet.allocator.shared_ledger import SharedLedger, ledgers, started

ME, PAGE = os.getpid(), 10


@pytest.fixture
def ledger(tmp_path: Path) -> SharedLedger:
    return SharedLedger("cpu", tmp_path / "own", patience=0.05)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that does nothing until it is killed."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_part_grows_by_what_is_free_in_whole_pages(ledger: SharedLedger, other: subprocess.Popen[str]) -> None:
    ledger.join(ME, 0, 105, 20)
    assert ledger.raise_to(ME, 60, PAGE) == 60
    ledger.join(other.pid, 0, None, 20)
    assert ledger.raise_to(other.pid, 100, PAGE) == 40
    assert ledger.raise_to(ME, 100, PAGE) == 60, "5 are no page"
    ledger.lower_to(ME, 30)
    assert ledger.raise_to(other.pid, 100, PAGE) == 70
    assert ledger.raise_to(other.pid, 10, PAGE) == 70, "nobody is lowered by that"
    ledger.leave(ME)
    assert ledger.read().parts.keys() == {other.pid}
    assert [other.path for other in ledgers(ledger.path.parent)] == [ledger.path]


def test_process_that_is_killed_has_no_part_any_more(ledger: SharedLedger, other: subprocess.Popen[str]) -> None:
    ledger.join(ME, 0, 100, 0)
    ledger.join(other.pid, 0, 100, 0)
    ledger.raise_to(other.pid, 80, PAGE)
    other.kill()
    other.wait()
    assert ledger.raise_to(ME, 100, PAGE) == 100
    assert started(other.pid) is None


def test_another_process_with_the_same_number_is_not_the_same(ledger: SharedLedger) -> None:
    ledger.join(ME, 0, 100, 0)
    said = json.loads(ledger.path.read_text())
    said["parts"][str(ME)][0] -= 1  # it started before
    ledger.path.write_text(json.dumps(said))
    assert not ledger.read().parts


def test_a_part_that_the_ledger_lost_is_what_is_free(ledger: SharedLedger, other: subprocess.Popen[str]) -> None:
    assert ledger.renew(ME, 0, 30, 100, 60, PAGE) == 60, "nobody has any"
    assert ledger.read().total == 100
    assert ledger.renew(ME, 0, 30, 100, 60, PAGE) == 60
    ledger.leave(ME)
    ledger.join(other.pid, 0, 100, 80)
    assert ledger.raise_to(other.pid, 75, PAGE) == 70
    assert ledger.renew(ME, 0, 30, 100, 60, PAGE) == 30
    assert {part.floor for part in ledger.read().parts.values()} == {80, 20}, "no more than the total in any case"
    assert ledger.renew(ME, 0, 30, 100, 10, PAGE) == 10


def test_a_lower_total_is_reached_once_the_parts_are(ledger: SharedLedger) -> None:
    ledger.join(ME, 0, 100, 30)
    ledger.raise_to(ME, 80, PAGE)
    assert ledger.aim(50).total == 100
    ledger.lower_to(ME, 60)
    assert ledger.raise_to(ME, 100, PAGE) == 60, "nobody grows meanwhile"
    ledger.lower_to(ME, 50)
    assert ledger.read().total == 50
    assert ledger.aim(200).total == 200
    ledger.aim(40)
    assert ledger.give_up().target == 200
    with pytest.raises(SharedBudgetError, match="keep 30B in any case"):
        ledger.aim(20)


def test_parts_that_do_not_fit_are_refused(ledger: SharedLedger, other: subprocess.Popen[str]) -> None:
    with pytest.raises(SharedBudgetError, match="nobody shares a budget on cpu yet"):
        ledger.join(ME, 0, None, 0)
    with pytest.raises(SharedBudgetError, match="nobody shares a budget on cpu yet"):
        ledger.aim(100)
    ledger.join(ME, 0, 100, 60)
    with pytest.raises(SharedBudgetError, match="shares a budget already"):
        ledger.join(ME, 1, 100, 0)
    with pytest.raises(SharedBudgetError, match="is 100B, and not 200B"):
        ledger.join(other.pid, 0, 200, 0)
    with pytest.raises(SharedBudgetError, match="keep in any case is 110B"):
        ledger.join(other.pid, 0, None, 50)
    ledger.leave(ME)
    assert ledger.join(other.pid, 0, 200, 0).total == 200, "nobody has the old one any more"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"total": -1, "target": 1, "parts": {}}',
        '{"total": 1, "target": 1, "parts": {"1": [1]}}',
        "over",
    ],
)
def test_damaged_ledger_is_told_with_what_to_do(ledger: SharedLedger, text: str) -> None:
    over = {"total": 1, "target": 1, "parts": {str(ME): [started(ME), 0, 2, 0]}}
    ledger.path.write_text(json.dumps(over) if text == "over" else text)
    for act in (ledger.read, lambda: ledger.raise_to(ME, 1, 1), lambda: ledger.join(ME, 0, 1, 0)):
        with pytest.raises(LedgerDamaged, match=r"End all processes that share it .* delete the file"):
            act()
    ledger.path.unlink()
    ledger.join(ME, 0, 100, 0)
    ledger.path.unlink()
    with pytest.raises(LedgerDamaged, match="does not know process"):
        ledger.raise_to(ME, 1, 1)


def test_a_process_that_is_stopped_with_the_lock_is_not_waited_for_longer(ledger: SharedLedger) -> None:
    """The kernel drops the lock as soon as it is dead."""
    ledger.join(ME, 0, 100, 0)
    program = f"import fcntl, time; f = open({str(ledger.path.with_suffix('.lock'))!r}, 'r+'); "
    program += "fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            holder.send_signal(signal.SIGSTOP)
            with pytest.raises(SharedBudgetError, match=r"locked for longer than 0\.05 s"):
                ledger.raise_to(ME, 10, PAGE)
        finally:
            holder.kill()
    assert ledger.raise_to(ME, 10, PAGE) == 10


def test_nobody_else_can_read_or_write_it(ledger: SharedLedger) -> None:
    ledger.join(ME, 0, 100, 0)
    assert ledger.path.parent.stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in ledger.path.parent.iterdir()} == {0o600}
    ledger.path.parent.chmod(0o755)
    with pytest.warns(RuntimeWarning, match=r"could be read by others \(755\): it is narrowed to its user"):
        SharedLedger("cpu", ledger.path.parent)
    assert ledger.path.parent.stat().st_mode & 0o077 == 0
