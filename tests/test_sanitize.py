"""The core and the stand-in under ASan/UBSan and TSan, briefly: the stress program.

`make sanitize` runs it longer, and the property test too.
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


@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_the_core_is_clean(kind: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None or not supported(kind, tmp_path):
        pytest.skip(f"g++ has no -fsanitize={kind} that runs on this machine")
    sizes = [f"KIND={kind}", "OPERATIONS=1500", f"PYTHON={sys.executable}"]
    command = ["make", "-C", str(NATIVE), "stress", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    assert "every page came back" in done.stdout
