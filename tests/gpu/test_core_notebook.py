"""`%load_ext ballonet` and `%unload_ext ballonet`, also where torch cannot return to its own allocator."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from .scene import everywhere

pytest.importorskip("IPython")

NOTEBOOK = """
    import os
    from IPython.core.interactiveshell import InteractiveShell
    import torch
    import ballonet
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "ballonet")
    kept = torch.ones(2**18, device="{device}")
    shell.run_line_magic("unload_ext", "ballonet")
    os.environ["BALLONET_BUDGET"] = "48MiB"
    shell.run_line_magic("load_ext", "ballonet")
    assert ballonet.stats().budget == 48 * 2**20, ballonet.stats().budget
    assert float(kept.sum()) == 2**18
"""


@everywhere
def test_a_pool_that_stayed_gets_the_budget_that_is_asked_for(kind: str) -> None:
    environment = {**os.environ, "BALLONET_DEVICE": kind, "BALLONET_BUDGET": "64MiB", "BALLONET_PAGE_SIZE": "2MiB"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOTEBOOK.format(device=kind))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ballonet: unloaded; models are as they were. T" in done.stdout, "the pool stays, and why"
