"""The stand-in's scenes that need a process of their own (scenes.py says what each shows)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCENES = Path(__file__).with_name("scenes.py")
NAMES = re.findall(r"^def ([a-z]\w+)\(driver: Driver\)", SCENES.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_scene(standin_library: Path, name: str) -> None:
    if name == "too_many_maps" and int(Path("/proc/sys/vm/max_map_count").read_text()) > 300_000:
        pytest.skip("vm.max_map_count is so high here that getting there takes too long")
    command = [sys.executable, str(SCENES), name, str(standin_library)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "done"
