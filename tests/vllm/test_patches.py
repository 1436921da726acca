"""A vLLM that lacks what the connector stands on is refused with what it lacks: versions made up for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ballonet.allocator.errors import UnsupportedVersion
from ballonet.hooks import vllm as patches

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
ALLOCATE = "vllm.v1.worker.utils"


def version(folder: Path, lacks: str = "", zeros: str = "torch.zeros(1)") -> None:
    """Writes a vLLM with all that is looked for, but for a name, a method or a module, that makes its cache so."""
    for module, names in patches._NAMES.items():
        *packages, file = module.split(".")
        for depth in range(1, len(packages) + 1):
            inner = folder.joinpath(*packages[:depth])
            inner.mkdir(exist_ok=True)
            (inner / "__init__.py").write_text('__version__ = "0.9"\n')
        if module == lacks:
            continue
        lines = []
        for owner in dict.fromkeys(name.split(".")[0] for name in names):
            lines += [f"class {owner}:", "    pass"] if owner != lacks else []
        for owner, _, method in (name.partition(".") for name in names if name != lacks):
            lines += [f"{owner}.{method} = lambda self: None"] if method else []
        if module == ALLOCATE:
            lines = ["import torch", "def allocate_kv_cache():", f"    return {zeros}"]
        folder.joinpath(*packages, f"{file}.py").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `import vllm` looks first. Nothing of it is imported yet, and nothing of it stays."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    """The modules of a vLLM that are imported."""
    return [module for module in sys.modules if module == "vllm" or module.startswith("vllm.")]


def test_a_version_with_all_of_it_will_do(folder: Path) -> None:
    version(folder)
    patches.check()


@pytest.mark.parametrize(
    "lacks",
    [
        "vllm.v1.core.block_pool",
        BASE,
        "SupportsHMA",
        "BlockPool.evict_blocks",
        "KVConnectorBase_V1.get_mem_pool_context",
        "KVConnectorBase_V1.has_pending_push_work",
        "FreeKVCacheBlockQueue.prepend_n",
    ],
)
def test_missing_seam_is_named(folder: Path, lacks: str) -> None:
    version(folder, lacks)
    with pytest.raises(UnsupportedVersion, match=rf"vLLM 0\.9 lacks {lacks}, which the connector stands on: use vLLM"):
        patches.check()


def test_a_cache_that_is_made_otherwise_is_refused(folder: Path) -> None:
    version(folder, zeros="torch.empty(1)")
    with pytest.raises(UnsupportedVersion, match="lacks allocate_kv_cache that makes"):
        patches.check()


def test_a_package_that_vllm_lacks_is_no_question_of_the_version(folder: Path) -> None:
    version(folder)
    (folder / "vllm" / "v1" / "core" / "block_pool.py").write_text("import no_such_package_of_vllm\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_vllm"):
        patches.check()


def test_without_vllm_it_is_an_import_error(folder: Path) -> None:
    (folder / "vllm.py").write_text("raise ModuleNotFoundError(\"No module named 'vllm'\", name='vllm')\n")
    with pytest.raises(ImportError, match="vllm"):
        patches.check()
