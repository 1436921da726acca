"""The core and the stand-in under ASan/UBSan and TSan, briefly: the stress program, and the page table's states.

`make sanitize` runs it longer, and the property test too. Here it is not optimized: it compiles in half the time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent / "native"


def supported(kind: str, folder: Path) -> bool:
    """Whether the compiler has the sanitizer, and a program under it starts here."""
    program = folder / "probe"
    flags = [f"-fsanitize={kind}", "-pthread", "-xc++", "-", "-o", str(program)]
    made = subprocess.run(["g++", *flags], input="int main() {}", capture_output=True, text=True, check=False)
    return made.returncode == 0 and subprocess.run([program], capture_output=True, check=False).returncode == 0


def make(target: str, kind: str, *settings: str) -> str:
    """Builds and runs a native program under the sanitizer; returns what it prints."""
    command = ["make", "-C", str(NATIVE), target, f"KIND={kind}", f"PYTHON={sys.executable}", *settings]
    command += ["OPTIMIZE=-O0", f"OUT={NATIVE.parents[1] / 'build' / 'sanitize-quick'}"]  # apart from `make sanitize`
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


def skip_without(kind: str, folder: Path) -> None:
    if shutil.which("g++") is None or not supported(kind, folder):
        pytest.skip(f"g++ has no -fsanitize={kind} that runs on this machine")


@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_the_core_is_clean(kind: str, tmp_path: Path) -> None:
    skip_without(kind, tmp_path)
    assert "every page came back" in make("stress", kind, "OPERATIONS=1500")


def test_the_page_table_is_sound_after_every_step(tmp_path: Path) -> None:
    skip_without("address,undefined", tmp_path)
    make("page-table", "address,undefined")
